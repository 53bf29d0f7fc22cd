"""Who may do what: keys and their scopes, admin routes, and browsers that act for a stranger's page."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from qmflask.config import ApiKey, Config
from qmflask.errors import Forbidden, Unauthorized
from qmflask.headers import offered_key
from qmflask.names import Resolved

log = logging.getLogger(__name__)

Environ = Mapping[str, Any]


def accept(config: Config, environ: Environ) -> ApiKey | None:
    """The configured key that the request carries; None when no keys are configured. Raises Unauthorized."""
    if not config.api_keys:
        return None
    text = offered_key(environ) or ""
    # A header's bytes come as latin-1 text, Basic's password as what its UTF-8 means.
    as_bytes, as_text = text.encode("latin-1", "replace"), text.encode("utf-8", "replace")
    found = None
    for key in config.api_keys:  # all of them, so that the time tells nothing about which one matched
        wanted = key.key.encode()
        if hmac.compare_digest(wanted, as_bytes) | hmac.compare_digest(wanted, as_text):
            found = key
    if found is None:
        raise Unauthorized(
            "unauthorized: invalid or missing API key; send it as Authorization: Bearer KEY or x-api-key"
        )
    return found


def require_admin(config: Config, environ: Environ) -> ApiKey | None:
    """Let an admin pass: any of our own clients where no keys are configured. Raises Unauthorized, Forbidden."""
    key = accept(config, environ)
    if key is not None and not key.admin:
        raise Forbidden("this needs a key with admin: true")
    if (key is None or _ambient(environ)) and _from_elsewhere(environ):
        raise Forbidden("refused: a page of another site sent this through a browser; use an admin key")
    return key


def require_all_models(config: Config, environ: Environ) -> None:
    """For what names every model: a key that may use all of them, admin or not. Raises Unauthorized, Forbidden."""
    key = accept(config, environ)
    if key is not None and not key.admin and "*" not in key.models:
        raise Forbidden('this needs a key with admin: true, or one for all models (models: ["*"])')


def check_websocket(key: ApiKey | None, environ: Environ) -> None:
    """Raise Forbidden for a page of another site that uses the key its browser was given for ours.

    Such a page cannot read the answers to its other requests. Without keys it is for the model server, which sees the
    Origin, to decide.
    """
    if key is not None and _ambient(environ) and _from_elsewhere(environ):
        raise Forbidden("refused: a page of another site opened this websocket through a browser")


def may_use(key: ApiKey | None, config: Config, asked: str, resolved: Resolved) -> bool:
    """Whether the key's globs match the name that was asked for, or any name of what it means."""
    if key is None or "*" in key.models:
        return True
    return _matches(key, (asked, *_names_of(config, resolved)))


def check_model(key: ApiKey | None, config: Config, asked: str, resolved: Resolved) -> None:
    """Raise Forbidden unless the key may use this model."""
    if not may_use(key, config, asked, resolved):
        raise Forbidden(f"this key may not use the model {asked!r}", param="model")


def sees(key: ApiKey | None, names: Iterable[str]) -> bool:
    """Whether a list shown to this key's owner may contain something that goes by these names."""
    return key is None or "*" in key.models or _matches(key, names)


def is_admin(key: ApiKey | None) -> bool:
    """True without keys, too: then everybody is."""
    return key is None or key.admin


def _matches(key: ApiKey, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in key.models)


def _names_of(config: Config, resolved: Resolved) -> tuple[str, ...]:
    model = config.models.get(resolved.id) if resolved.kind == "model" else None
    if model is not None:
        return (model.id, *model.aliases)
    if resolved.kind == "peer":
        return (f"{resolved.peer}/{resolved.upstream_name}", resolved.upstream_name)
    return (resolved.id,)


def _ambient(environ: Environ) -> bool:
    """True for credentials that a browser sends by itself, for whatever page asks: only headers were put there."""
    return str(environ.get("HTTP_AUTHORIZATION", ""))[:6].lower() == "basic "


def _from_elsewhere(environ: Environ) -> bool:
    """True if a browser says that a page of another site makes it send this."""
    site = environ.get("HTTP_SEC_FETCH_SITE")
    if site in ("same-origin", "none"):
        return False
    origin = environ.get("HTTP_ORIGIN")
    if origin is None:
        return site is not None
    return _host_of(str(origin)) != str(environ.get("HTTP_HOST", "")).lower()


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def warn_if_open(config: Config, addresses: Iterable[Any]) -> None:
    """Say once, at the start, that everybody who reaches the machine may use it. `addresses`: as of getsockname."""
    hosts = [address[0] for address in addresses if isinstance(address, tuple)]
    reachable = sorted({host for host in hosts if not ip_address(host.partition("%")[0]).is_loopback})
    if reachable and not config.api_keys:
        log.warning(
            "no apiKeys are configured and the service listens on %s: everybody who can reach that address may use "
            "and unload the models",
            ", ".join(reachable),
        )
