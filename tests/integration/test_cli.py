"""The commands that talk to a service: while it runs, with keys, over a socket file, and after it has crashed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qmflask.cli import main
from qmflask.cli.service import DOWN
from tests.integration.conftest import StartService
from tests.service import PATIENCE, REPO, Service, eventually


def models(service: Service) -> dict[str, Any]:
    """Two models that do not fit together."""
    names = {"alpha": ["first"], "beta": []}
    return {
        "vramBudgetGB": 16,
        "models": {
            name: {"cmd": service.fake(name, load_time=0.1), "estVramGB": 9, "aliases": aliases}
            for name, aliases in names.items()
        },
    }


def run(service: Service, *args: str, key: str | None = None, url: str = "") -> Result:
    """One command, in an environment that leads to the service."""
    environ = {
        "QMFLASK_URL": url or service.url,
        "QMFLASK_STATE": str(service.state),
        "QMFLASK_CONFIG": str(service.config_path),
        "QMFLASK_API_KEY": key,
    }
    return CliRunner().invoke(main, list(args), env=environ)


#: Variables that are not there.
NOTHING = dict.fromkeys(("QMFLASK_CONFIG", "QMFLASK_STATE", "QMFLASK_API_KEY", "STATE_DIRECTORY"))


def in_background(service: Service, *args: str) -> subprocess.Popen[str]:
    """One command as a process of its own."""
    command = [sys.executable, "-c", "from qmflask.cli import main; main()", *args, "--url", service.url]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def states(service: Service) -> dict[str, str]:
    """Model -> state, by `ps --json`."""
    result = run(service, "ps", "--json")
    assert result.exit_code == 0, result.output
    return {model["id"]: model["state"] for model in json.loads(result.stdout)["models"]}


def test_a_day_with_a_service(start_service: StartService) -> None:
    service = start_service(models)
    assert "no model is loaded" in run(service, "ps").output

    assert run(service, "load", "first").output.endswith("first: ready\n")
    assert states(service) == {"alpha": "ready", "beta": "stopped"}
    plan = run(service, "plan", "beta")
    assert plan.exit_code == 0 and "stop  alpha" in plan.output
    loaded = run(service, "load", "beta", "nonsense", "--json")
    assert loaded.exit_code == 1
    assert [row["state"] for row in json.loads(loaded.stdout)] == ["ready", "failed"]
    assert "model not found" in json.loads(loaded.stdout)[1]["error"]

    assert states(service) == {"alpha": "stopped", "beta": "ready"}
    shown = run(service, "top", "--times", "1").output
    assert "beta" in shown and "alpha" not in shown and "models hold 9.0 of 16.0 GiB" in shown
    assert "alpha" in run(service, "ps", "--all").output
    assert "model beta: ready" in run(service, "logs").output
    assert len(run(service, "logs", "-n", "1").output.splitlines()) == 1
    assert run(service, "logs", "first").exit_code == 0

    service.write_config({**models(service), "holdMs": 1})
    assert "2 models, generation 2" in run(service, "reload").output
    service.write_config({"models": {"alpha": {}}})
    refused = run(service, "reload")
    assert refused.exit_code == 1 and "the old one stays in force" in refused.output

    examined = run(service, "doctor")
    assert examined.exit_code == 1 and "the changed configuration is not taken" in examined.output
    service.write_config(models(service))
    assert run(service, "reload", "--json").exit_code == 0
    examined = run(service, "doctor", "--json")
    findings = {(row["topic"], row["grade"]) for row in json.loads(examined.stdout)}
    assert examined.exit_code == 0, examined.output
    assert {("service", "ok"), ("scheduler", "ok"), ("models", "ok"), ("ports", "ok")} <= findings
    # Without our variables: what the service itself uses is looked at.
    unnamed = CliRunner().invoke(main, ["doctor"], env={"QMFLASK_URL": service.url, **NOTHING})
    assert f"{service.config_path}: 2 models" in unnamed.output and str(service.state) in unnamed.output
    assert "WARN  service" not in unnamed.output

    assert run(service, "unload").exit_code == 2
    assert run(service, "unload", "--all").output.endswith("all models: stopped\n")
    assert states(service) == {"alpha": "stopped", "beta": "stopped"}, "what is shown is not older than the question"


def test_what_waits_is_shown_and_can_be_cancelled(start_service: StartService) -> None:
    service = start_service(models)
    with service.stream("alpha", headers={"X-Fake": "chunks=100000,interval=0.05"}) as stream:
        next(iter(stream))
        waiting = in_background(service, "load", "beta")

        def rows() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = json.loads(run(service, "ps", "--json").stdout)["requests"]
            return found if any(row.get("why") == "busy: alpha" for row in found) else []

        assert waiting.stderr is not None and waiting.stderr.readline().startswith("beta waits, busy: alpha: ")
        streaming = next(row for row in eventually(rows, "beta waits for alpha") if row["state"] == "granted")
        assert "busy: alpha (place 1)" in run(service, "ps").output
        assert run(service, "cancel", streaming["id"]).output == f"{streaming['id']}: cancelled\n"
        assert waiting.communicate(timeout=PATIENCE)[0] == "beta: ready\n"
    with service.stream("beta", headers={"X-Fake": "chunks=100000,interval=0.05"}) as stream:
        next(iter(stream))
        stopping = in_background(service, "unload", "--all")
        assert stopping.stderr is not None and stopping.stderr.readline() == "not stopped yet: beta, 1 answer\n"
        stopping.send_signal(signal.SIGINT)
        assert stopping.communicate(timeout=PATIENCE)[1] == "\nAborted!\n" and stopping.returncode == 1
    gone = run(service, "cancel", streaming["id"], "--json")
    assert gone.exit_code == 1 and json.loads(gone.stdout)[0]["cancelled"] is False


def test_keys_and_a_socket_file(start_service: StartService, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/http.sock"
    keys = {"apiKeys": [{"key": "boss", "admin": True}, {"key": "guest"}]}
    service = start_service(lambda s: {**models(s), **keys}, args=("--bind", address), workers=1)
    for key, text in ((None, "QMFLASK_API_KEY is not set"), ("x", "not accepted"), ("guest", "admin: true")):
        result = run(service, "ps", key=key, url=address)
        assert result.exit_code == 1 and text in result.output, result.output
    loaded = run(service, "load", "alpha", key="boss", url=address)
    assert loaded.exit_code == 0, loaded.output
    assert "alpha" in run(service, "ps", key="boss", url=address).output
    assert "boss" not in run(service, "doctor", key="boss", url=address).output


@pytest.mark.parametrize("keep", [False, True])
def test_after_a_crash(start_service: StartService, keep: bool) -> None:
    service = start_service(lambda s: {**models(s), "onShutdown": "keep" if keep else "stop"})
    assert run(service, "load", "alpha").exit_code == 0
    service.signal(signal.SIGKILL)
    assert service.process is not None
    service.process.wait(PATIENCE)
    eventually(lambda: len(service.processes()) == 1, "the workers end, the model stays")

    assert states(service) == {"alpha": "ready", "beta": "stopped"}
    assert "from the state directory" in run(service, "ps").output
    assert "model alpha: ready" in run(service, "logs").stdout
    assert run(service, "logs", "nonsense").exit_code == DOWN
    for command in (("load", "beta"), ("reload",), ("cancel", "x"), ("plan", "beta"), ("top",)):
        assert run(service, *command).exit_code == DOWN, command
    examined = run(service, "doctor")
    assert "without a service these still run: alpha" in examined.output

    stopped = run(service, "unload", "--all", "--json")
    assert stopped.exit_code == 0, stopped.output
    assert [row["model"] for row in json.loads(stopped.stdout)] == ["alpha"]
    assert not service.processes()
    assert states(service) == {"alpha": "stopped", "beta": "stopped"}


def test_gunicorn_says_once_what_is_wrong_with_the_configuration(tmp_path: Path) -> None:
    service = Service(tmp_path, {"models": {"a": {}}})
    try:
        service.spawn()
        assert service.process is not None and service.process.wait(PATIENCE) == 3
        assert service.log().count("qmflask cannot start") == service.log().count("models.a") == 1, service.log()
    finally:
        service.close()


def test_what_is_doubtful_is_said_once(start_service: StartService) -> None:
    service = start_service({"models": {}, "logLevel": "loud"})
    assert service.log().count("there are no models") == service.log().count("unknown log level") == 1, service.log()


def test_output_may_be_cut(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'from qmflask.cli import main; main()' schema | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=REPO, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_without_anything(tmp_path: Path) -> None:
    environ = {"QMFLASK_URL": f"unix:{tmp_path}/none", "QMFLASK_STATE": str(tmp_path / "state")}
    for command in (["ps"], ["logs"], ["load", "x"], ["top"]):
        result = CliRunner().invoke(main, command, env=environ)
        assert result.exit_code == DOWN and "no service at unix:" in result.output, result.output
    assert CliRunner().invoke(main, ["ps", "--url", "ftp://x"], env=environ).exit_code == 2
    assert not os.listdir(tmp_path), "looking leaves nothing behind"
