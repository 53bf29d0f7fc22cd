"""What people install: an sdist, the wheel made of it, in an environment of its own and far from the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmflask import __version__
from tests.service import PATIENCE, REPO, PortBlock, eventually, processes_with

_SOURCES = (
    "pyproject.toml",
    "setup.py",
    "setup.cfg",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "Makefile",
    "gunicorn.conf.py",
    "wsgi.py",
)


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist, which is built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("packaging")
    sources = folder / "sources"
    sources.mkdir()
    for name in (*_SOURCES, "CHANGELOG.md", "CONTRIBUTING.md"):
        if (REPO / name).exists():
            shutil.copy(REPO / name, sources / name)
    for name in ("qmflask", "conf", "docs"):
        skip = shutil.ignore_patterns("__pycache__", "images")
        shutil.copytree(REPO / name, sources / name, symlinks=True, ignore=skip)
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", folder, cwd=sources)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "-q", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *offline, "-w", folder, unpacked, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with this wheel; its dependencies come from the environment of the tests."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    into = ("--no-deps", "--no-index", "-q", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", *into, wheel, cwd=folder)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture
def environment(clean: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables without the repository, the tests' environment or a configuration; nothing may be left running."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "QMFLASK_STATE": str(tmp_path / "state")}
    yield env
    assert not processes_with(f"QMFLASK_STATE={tmp_path / 'state'}")


def test_what_is_inside(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("py.typed", "conf/quartermaster.yaml", "conf/nginx.conf", "web/templates/shell.html"):
        assert f"qmflask/{name}" in names
    assert any(name.startswith("qmflask/web/static/") and name.endswith(".js") for name in names)
    assert {name.split("/")[0] for name in names} == {"qmflask", f"qmflask-{__version__}.dist-info"}


def test_it_is_another_qmflask(clean: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """Else the next test would prove nothing."""
    where = run(clean / "python", "-c", "import qmflask; print(qmflask.__file__)", cwd=tmp_path, env=environment)
    assert Path(where.strip()).is_relative_to(clean.parent)
    assert run(clean / "qmflask", "--version", cwd=tmp_path, env=environment).split()[-1] == __version__


def test_serve_from_any_folder(clean: Path, environment: dict[str, str], tmp_path: Path, ports: PortBlock) -> None:
    address = f"127.0.0.1:{ports.take()}"
    environment["QMFLASK_URL"] = url = f"http://{address}"
    command = [str(clean / "qmflask"), "serve", "--bind", address, "--workers", "1", "--threads", "8"]
    with (tmp_path / "log").open("wb") as log:
        service = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:

        def up() -> bool:
            assert service.poll() is None, (tmp_path / "log").read_text()
            done = subprocess.run([clean / "qmflask", "ps"], env=environment, cwd=tmp_path, capture_output=True)
            return done.returncode == 0 and b"schedules" in done.stdout

        eventually(up, "the service answers", every=0.2)
        run(clean / "qmflask", "load", "cedar", cwd=tmp_path, env=environment)
        body = json.dumps({"model": "cedar", "messages": [{"role": "user", "content": "hi"}]}).encode()
        with urllib.request.urlopen(f"{url}/v1/chat/completions", body, PATIENCE) as answer:
            assert b"I am cedar" in answer.read()
        with urllib.request.urlopen(f"{url}/ui/", timeout=PATIENCE) as page:
            assert b"<html" in page.read()
    finally:
        service.terminate()
        code = service.wait(PATIENCE)
    assert code == 0, (tmp_path / "log").read_text()
