"""The request target as the client spelled it: WSGI decodes paths, and decoding cannot be undone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

_UNRESERVED = "/:@!$&'()*+,;=~-._"


def raw_path(environ: Mapping[str, Any]) -> str:
    """The percent-encoded path below where we are mounted, without the query.

    From gunicorn's RAW_URI or the REQUEST_URI of others; encoded anew where a server has neither.
    """
    target = environ.get("RAW_URI") or environ.get("REQUEST_URI")
    mount = environ.get("SCRIPT_NAME", "")
    if not target:
        return quote(environ.get("PATH_INFO", ""), safe=_UNRESERVED, encoding="latin-1")
    if not target.startswith("/"):  # GET http://host/path HTTP/1.1
        _, scheme, rest = target.partition("://")
        target = "/" + rest.partition("/")[2] if scheme else "/"
    path = str(target.partition("?")[0])
    return path[len(mount) :] or "/" if mount and path.startswith(mount) else path


def cleaned(path: str) -> str:
    """The path without empty, `.` and `..` segments; equal to `path` where there are none."""
    if "//" not in path and "/." not in path:
        return path
    kept: list[str] = []
    segments = path.split("/")[1:]
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment not in ("", "."):
            kept.append(segment)
    ends_open = segments[-1] in ("", ".", "..") and bool(kept)
    return "/" + "/".join(kept) + ("/" if ends_open else "")
