"""nginx before a service, with the shipped conf/nginx.conf on a unix socket."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.service import REPO, PortBlock, eventually

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/sbin:/usr/local/bin")

_MAIN = """
daemon off; master_process off; worker_processes 1; error_log {folder}/error.log; pid {folder}/nginx.pid;
events {{ worker_connections 256; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, behind: Path | str, **replaced: str) -> Iterator[int]:
    """Start nginx before the socket (or HOST:PORT) `behind`; gives its port. `replaced`: other values of directives."""
    assert NGINX, "nginx is missing: apt-get install nginx"
    folder.mkdir(exist_ok=True)
    ports = PortBlock()
    port = ports.take()
    site = (REPO / "conf" / "nginx.conf").read_text()
    address = behind if isinstance(behind, str) else f"unix:{behind}"
    changes = {"unix:/run/qmflask/http.sock": address, "listen 8080": f"listen 127.0.0.1:{port}"}
    for old, new in {**changes, **replaced}.items():
        assert old in site
        site = site.replace(old, new)
    (folder / "site.conf").write_text(site)
    (folder / "nginx.conf").write_text(_MAIN.format(folder=folder))
    with subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")]) as process:
        try:
            eventually(lambda: _listens(port), "nginx listens")
            yield port
        finally:
            process.terminate()
    ports.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
