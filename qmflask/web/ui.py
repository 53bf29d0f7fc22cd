"""`/ui`: one page from one template, and its style sheet and ES modules; nothing comes from anywhere else."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

from flask import Blueprint, Response, render_template, request
from werkzeug.exceptions import NotFound

from qmflask import __version__
from qmflask.router import Router
from qmflask.web import auth

#: Scripts and styles only from here, nothing inline, nothing framed; images may be the user's own attachments.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

_HEADERS = [
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
]

_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class Asset:
    """One static file, as it is and packed."""

    data: bytes
    packed: bytes
    kind: str


class Assets:
    """The static files, read once; their digest is part of each URL, so that browsers may keep them for ever."""

    @cached_property
    def found(self) -> dict[str, Asset]:
        """Asset by path below `static`."""
        assets = {}
        for entry in files("qmflask.web").joinpath("static").iterdir():
            kind = _TYPES.get(entry.name[entry.name.rfind(".") :])
            if kind is not None:
                data = entry.read_bytes()
                assets[entry.name] = Asset(data, gzip.compress(data, 9, mtime=0), kind)
        return assets

    @cached_property
    def digest(self) -> str:
        """Changes when any file does."""
        parts = (name.encode() + asset.data for name, asset in sorted(self.found.items()))
        return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """The page, its files and the redirects to it."""
    routes = Blueprint("ui", __name__, template_folder="templates")
    assets = Assets()

    @routes.before_request
    def check_key() -> None:
        if request.path.startswith("/ui"):
            auth.accept(router().live.config, request.environ)

    @routes.get("/")
    def to_page() -> Response:
        return Response(status=302, headers=[("Location", f"{request.script_root}/ui")])

    @routes.get("/ui")
    def to_folder() -> Response:
        return Response(status=307, headers=[("Location", f"{request.script_root}/ui/")])

    @routes.get("/favicon.ico")
    def icon() -> Response:
        return _asset(assets, "icon.svg")

    @routes.get("/ui/static/<digest>/<name>")
    def static(digest: str, name: str) -> Response:
        return _asset(assets, name, for_ever=digest == assets.digest)

    @routes.get("/ui/", defaults={"path": ""})
    @routes.get("/ui/<path:path>")
    def page(path: str) -> Response:
        if "." in path:
            raise NotFound
        root = f"{request.script_root}/"
        html = render_template("shell.html", root=root, digest=assets.digest, version=__version__)
        return Response(
            html, headers=[*_HEADERS, ("Cache-Control", "no-cache")], content_type="text/html; charset=utf-8"
        )

    return routes


def _asset(assets: Assets, name: str, *, for_ever: bool = False) -> Response:
    asset = assets.found.get(name)
    if asset is None:
        raise NotFound
    headers = [*_HEADERS, ("Vary", "Accept-Encoding")]
    headers.append(("Cache-Control", "private, max-age=31536000, immutable" if for_ever else "no-cache"))
    data = asset.data
    if "gzip" in request.headers.get("Accept-Encoding", "").lower():
        data = asset.packed
        headers.append(("Content-Encoding", "gzip"))
    return Response(data, headers=headers, content_type=f"{asset.kind}; charset=utf-8")
