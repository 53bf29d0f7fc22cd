"""Whether a text can be a server's URL; as strict as llama-swap, whose files must load, and no stricter."""

from __future__ import annotations

import re

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_BAD_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_HOST = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=%\x80-\U0010ffff-]*\Z")


def url_fault(text: str) -> str | None:
    """Why `text` is not a URL, or None when it is (a missing scheme is no fault)."""
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        return "it holds a control character"
    text = text.split("#", 1)[0]
    if text.startswith(":"):
        return "the scheme before :// is missing"
    scheme = _SCHEME.match(text)
    rest = (text[scheme.end() :] if scheme else text).split("?", 1)[0]
    if not rest.startswith("/"):
        if scheme:
            return None
        if ":" in rest.split("/")[0]:
            return "a host and port need http:// before them"
    elif rest.startswith("//"):
        authority, _slash, rest = rest[2:].partition("/")
        fault = _authority_fault(authority)
        if fault:
            return fault
    return "a % is not followed by two hexadecimal digits" if _BAD_PERCENT.search(rest) else None


def _authority_fault(authority: str) -> str | None:
    host = authority.rpartition("@")[2]
    if host.startswith("["):
        _inner, bracket, port = host.partition("]")
        if not bracket:
            return "the ] of the IPv6 address is missing"
        return None if not port or re.fullmatch(r":[0-9]*", port) else "the port is not a number"
    name, colon, port = host.partition(":")
    if colon and not re.fullmatch(r"[0-9]*", port):
        return "the port is not a number"
    if not _HOST.match(name) or _BAD_PERCENT.search(name):
        return "the host holds a character that no host may have"
    return None


def port_of(text: str) -> int | None:
    """The port a URL names, or its scheme's; None when it is no http URL."""
    match = re.match(r"(?:(https?)://)?(?:[^/@]*@)?(\[[^\]]*\]|[^/:?#]*)(?::([0-9]{1,5}))?(?=[/?#]|\Z)", text)
    if not match:
        return None
    scheme, _host, port = match.groups()
    return int(port) if port else 443 if scheme == "https" else 80


def host_of(text: str) -> str:
    """The host a URL names, lower case, without brackets."""
    match = re.match(r"(?:[a-z]+://)?(?:[^/@]*@)?(\[[^\]]*\]|[^/:?#]*)", text)
    return match.group(1).strip("[]").lower() if match else ""
