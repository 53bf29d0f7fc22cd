"""Under other servers than gunicorn's threads: two models that swap, a stream, and what becomes of models."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import StartService
from tests.integration.fronting import nginx
from tests.service import PATIENCE, REPO, Service, eventually

pytestmark = pytest.mark.hosting

#: gunicorn settings without any of our hooks.
WITHOUT_HOOKS = "bind = []\ntimeout = 300\ncontrol_socket_disable = True\n"


def two(service: Service) -> dict[str, Any]:
    models = {name: {"cmd": service.fake(name, load_time=0.05), "estVramGB": 9} for name in ("alpha", "beta")}
    return {"vramBudgetGB": 16, "models": models}


class Other(Service):
    """A service under another server's command line."""

    server: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """That command line."""
        return [word.format(port=self.port) for word in self.server]


def swaps_and_streams(service: Service) -> None:
    """What every host must be able to do."""
    for name in ("alpha", "beta"):
        assert service.chat(name).status == 200
        assert [row["model"] for row in service.running() if row["state"] == "ready"] == [name]
    with service.stream("beta", headers={"X-Fake": "chunks=4,interval=0.15"}) as stream:
        assert list(stream)[-1] == "[DONE]"
    # Held back, all would come together.
    assert stream.arrivals[-1] - stream.arrivals[0] > 200_000_000


def behind(service: Service, folder: Path, address: Path | str) -> None:
    """The same through the shipped conf/nginx.conf in front of `address`."""
    direct = service.port
    with nginx(folder, address) as service.port:
        swaps_and_streams(service)
    service.port = direct


def refuses_websockets(service: Service) -> None:
    """Where the server keeps the connection to itself."""
    reply = service.get("/upstream/beta/ws", headers={"Connection": "Upgrade", "Upgrade": "websocket"})
    assert (reply.status, reply.code) == (501, "websocket_unsupported")


def start_other(folder: Path, *server: str) -> Other:
    service = Other(folder, {}, workers=1)
    service.server = server
    service.write_config(two(service))
    return service


def test_waitress(tmp_path: Path) -> None:
    listen = ("--listen=127.0.0.1:{port}", "--threads=16", "qmflask.app:app")
    service = start_other(tmp_path / "waitress", sys.executable, "-m", "waitress", *listen)
    try:
        service.start()
        swaps_and_streams(service)
        refuses_websockets(service)
        service.stop()
        # After TERM waitress is simply gone; the models are there for the next start, which adopts them.
        (pid,) = service.processes()
        service.spawn()
        service.wait_until_up()
        row = eventually(service.running, "adopted")[0]  # the first request begins it: there is no hook
        assert (row["model"], row["pid"], row["state"]) == ("beta", pid, "ready")
        service.signal(signal.SIGINT)
        assert service.process is not None
        service.process.wait(PATIENCE)
        assert not service.processes(), "INT is an end of the service: models stop"
    finally:
        service.close()


def test_gunicorn_without_our_settings(tmp_path: Path) -> None:
    settings = tmp_path / "settings.py"
    settings.write_text(WITHOUT_HOOKS)
    more = ("--bind", "127.0.0.1:{port}", "--workers", "2", "--threads", "8", "wsgi:app")
    service = start_other(tmp_path / "bare", sys.executable, "-m", "gunicorn", "-c", str(settings), *more)
    try:
        service.start()
        swaps_and_streams(service)
        assert service.stop() == 0
        eventually(lambda: not service.processes(), "the last worker stops the models")
    finally:
        service.close()


def uwsgi() -> list[str]:
    """uWSGI's command line up to its plugin for this Python, or a reason to skip."""
    program = shutil.which("uwsgi")
    if program is None:
        pytest.skip("uwsgi is not installed (Debian: uwsgi-core, uwsgi-plugin-python3)")
    command = [program, "--plugin", "python3"] if program == "/usr/bin/uwsgi" else [program]
    told = subprocess.run([*command, "--python-version"], capture_output=True, text=True)
    wanted = f"{sys.version_info.major}.{sys.version_info.minor}."
    if not told.stdout.strip().startswith(wanted):
        pytest.skip(f"uwsgi is built for Python {told.stdout.strip() or '?'}, this is {wanted}x")
    return command


def test_uwsgi(tmp_path: Path) -> None:
    # The plugin brings its own standard library (no -H): of our environment it gets the packages alone.
    packages = ("--pythonpath", sysconfig.get_path("purelib"), "--pythonpath", str(REPO))
    socket_path = tmp_path / "http.sock"
    where = (*packages, "--http-socket", "127.0.0.1:{port}", "--http-socket", str(socket_path))
    sizes = ("--master", "--processes", "2", "--threads", "16", "--enable-threads", "--lazy-apps", "--need-app")
    service = start_other(tmp_path / "uwsgi", *uwsgi(), *where, *sizes, "--die-on-term", "--module", "qmflask.app:app")
    try:
        service.start()
        swaps_and_streams(service)
        refuses_websockets(service)
        behind(service, tmp_path / "nginx", socket_path)
        service.stop()
        eventually(lambda: not service.processes(), "the last worker stops the models")
    finally:
        service.close()


APACHE = """
ServerName localhost
PidFile {folder}/apache2.pid
DefaultRuntimeDir {folder}
ErrorLog /dev/stderr
LoadModule mpm_event_module {modules}/mod_mpm_event.so
LoadModule authz_core_module {modules}/mod_authz_core.so
LoadModule wsgi_module {modules}/mod_wsgi.so
WSGISocketPrefix {folder}/wsgi
WSGIDaemonProcess qmflask processes=2 threads=16 shutdown-timeout=60 python-path={packages} home={folder}
WSGIProcessGroup qmflask
WSGIApplicationGroup %{{GLOBAL}}
WSGIPassAuthorization On
WSGIScriptAlias / {repo}/wsgi.py
<Directory {repo}>
    Require all granted
</Directory>
"""


def apache(folder: Path) -> list[str]:
    """Apache's command line for a site in this folder, or a reason to skip."""
    program = shutil.which("apache2", path="/usr/sbin")
    modules = Path("/usr/lib/apache2/modules")
    wanted = f"mod_wsgi.so-{sys.version_info.major}.{sys.version_info.minor}"
    if program is None or not (modules / "mod_wsgi.so").exists():
        pytest.skip("mod_wsgi is not installed (Debian: libapache2-mod-wsgi-py3)")
    if (modules / "mod_wsgi.so").resolve().name != wanted:
        pytest.skip(f"the module is {(modules / 'mod_wsgi.so').resolve().name}, this Python needs {wanted}")
    # As for uWSGI: the module is tied to Debian's interpreter, our packages are put into its path.
    packages = f"{sysconfig.get_path('purelib')}:{REPO}"
    site = folder / "apache2.conf"
    site.write_text(APACHE.format(folder=folder, modules=modules, packages=packages, repo=REPO))
    command = [program, "-f", str(site), "-D", "FOREGROUND", "-c", "Listen 127.0.0.1:{port}"]
    if os.geteuid():
        return command
    # mod_wsgi refuses to run as root: a user who is nobody, but may read what is root's in this test.
    capabilities = "+dac_override,+dac_read_search,+kill"
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    return [*nobody, f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}", *command]


def test_mod_wsgi_in_daemon_mode(tmp_path: Path) -> None:
    folder = tmp_path / "apache"
    folder.mkdir()
    service = start_other(folder, *apache(folder))
    try:
        service.start()
        swaps_and_streams(service)
        refuses_websockets(service)
        service.stop()
        eventually(lambda: not service.processes(), "the last daemon stops the models")
    finally:
        service.close()


def test_the_sync_worker_serves_and_warns(start_service: StartService) -> None:
    service = start_service(two, workers=2, threads=1, args=("--worker-class", "sync"))
    swaps_and_streams(service)
    assert "the sync worker serves one request at a time" in service.log()
    assert service.log().count("sync worker serves") == 1


def test_gunicorns_own_threads_behind_nginx_by_tcp_and_by_file(start_service: StartService, tmp_path: Path) -> None:
    socket_path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:  # as systemd has it with `Type=notify`
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(PATIENCE)
        arguments = ("--worker-class", "gthread", "--bind", f"unix:{socket_path}")
        service = start_service(two, args=arguments, env={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert notify.recv(4096).startswith(b"READY=1")
    behind(service, tmp_path / "tcp", f"127.0.0.1:{service.port}")
    behind(service, tmp_path / "file", socket_path)


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd is not installed")
    unit = (REPO / "conf" / "qmflask.service").read_text()
    assert unit.count("/opt/qmflask/.venv/bin/qmflask") == 1
    path = tmp_path / "qmflask.service"
    path.write_text(unit.replace("/opt/qmflask/.venv/bin/qmflask", sys.executable))
    done = subprocess.run([program, "verify", "--man=no", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_application_is_found_where_passenger_looks(tmp_path: Path) -> None:
    code = "import passenger_wsgi, wsgi; print(passenger_wsgi.application is wsgi.application)"
    environ = {**os.environ, "PYTHONPATH": f"{REPO / 'conf'}:{REPO}", "QMFLASK_STATE": str(tmp_path / "state")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    assert not (tmp_path / "state").exists(), "nothing begins at import"
