"""The proxy on the way to servers on other machines: HTTP_PROXY, HTTPS_PROXY and NO_PROXY (compatibility 3.6)."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForwardProxy:
    """Where to connect instead; `headers` are lines for the proxy itself."""

    host: str
    port: int
    headers: tuple[str, ...] = ()

    def connect_head(self, host: str, port: int) -> bytes:
        """The request for a tunnel to a server."""
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}", *self.headers, "", ""]
        return "\r\n".join(lines).encode("latin-1")


class ForwardProxies:
    """What an environment says. Servers on this machine are never asked through a proxy."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        given = {name.lower(): value for name, value in environ.items() if name.lower().endswith("_proxy")}
        self._proxies = {scheme: _parse(given.get(f"{scheme}_proxy", "")) for scheme in ("http", "https")}
        self._bypass = {"no": given.get("no_proxy", "")}

    def __bool__(self) -> bool:
        return any(self._proxies.values())

    def to(self, scheme: str, host: str) -> ForwardProxy | None:
        """The proxy for a server, None where it is reached directly."""
        proxy = self._proxies.get(scheme)
        if proxy is None or _is_here(host) or proxy_bypass(host, self._bypass):
            return None
        return proxy


def _parse(text: str) -> ForwardProxy | None:
    if not text:
        return None
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        host, port = parts.hostname or "", parts.port or 80
    except ValueError:
        host, port = "", 0
    if parts.scheme != "http" or not host:
        log.warning("the proxy of the environment is not used: it must be http://HOST:PORT")
        return None
    if parts.username is None:
        return ForwardProxy(host, port)
    words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return ForwardProxy(host, port, (f"Proxy-Authorization: Basic {base64.b64encode(words.encode()).decode()}",))


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
