"""What `qmflask doctor` looks at on the machine itself: versions, configuration, state, cards, ports, nginx."""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from qmflask import __version__, processes
from qmflask.cli.findings import Finding, fail, ok, warn
from qmflask.cli.table import GIB, plural, size
from qmflask.config import Config, ConfigError, LaunchError, Model
from qmflask.configfiles import load_path
from qmflask.gpu import Amd, Nvml
from qmflask.memory.llama import read_command
from qmflask.memory.samples import Card
from qmflask.places import is_there
from qmflask.policy.eviction import gib
from qmflask.ports import holder_of, port_is_free
from qmflask.sampling import Sampler
from qmflask.store.database import StoreError, place_faults

#: Seconds that a driver gets to answer.
DRIVER = 5.0
#: Free bytes of the disk with the state below which it is going to run full.
LITTLE = 256 << 20


def versions() -> Iterator[Finding]:
    """What is installed."""
    names = [f"qmflask {__version__}", f"Python {platform.python_version()}"]
    for name in ("gunicorn", "Flask"):
        try:
            names.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            yield fail("versions", f"{name} is not installed", f"{sys.executable} -m pip install {name}")
    yield ok("versions", ", ".join(names))


def configuration(source: Path) -> tuple[Config | None, list[Finding]]:
    """The configuration as the service would load it, None when it cannot; and what is to be said of it."""
    try:
        loaded = load_path(source, os.environ)
    except ConfigError as error:
        text = f"{plural(len(error.problems), 'error')}, the first: {error.problems[0].text()}"
        return None, [fail("configuration", f"{source}: {text}", _check(source))]
    found = []
    if loaded.warnings:
        text = f"{plural(len(loaded.warnings), 'warning')}, the first: {loaded.warnings[0].text()}"
        found = [warn("configuration", f"{source}: {text}", _check(source))]
    if not found:
        found = [ok("configuration", f"{source}: {plural(len(loaded.config.models), 'model')}")]
    return loaded.config, found


def _check(source: Path) -> str:
    return f"qmflask check {source}"


def state(folder: Path) -> Iterator[Finding]:
    """The state directory: is it there, ours, local and roomy, and does somebody lead in it."""
    try:
        there = is_there(folder)
    except PermissionError:
        yield fail("state", f"{folder}: Permission denied", "run as the service's user, or set QMFLASK_STATE")
        return
    if not there:
        yield ok("state", f"{folder} is not there yet; the service makes it at its first start")
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        yield fail(
            "state", f"{folder} cannot be written by this user", "run as the service's user, or set QMFLASK_STATE"
        )
        return
    try:
        for text in place_faults(folder):
            yield warn("state", text, "set QMFLASK_STATE to a lasting folder")
    except StoreError as error:
        yield fail("state", str(error), "set QMFLASK_STATE to a folder on a local disk")
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        yield warn("state", f"{folder} can be read by others, logs and settings included", f"chmod 700 {folder}")
    free = shutil.disk_usage(folder).free
    if free < LITTLE:
        yield fail("state", f"only {free >> 20} MiB are free on the disk with {folder}", "free some space")
    led = processes.is_held(folder / "leader.lock")
    yield ok("state", f"{folder}, {size(free)} GiB free, " + ("a leader holds its lock" if led else "nobody leads"))


def commands(config: Config) -> Iterator[Finding]:
    """Each model's program and model file; what many of them lack is said once."""
    faults: dict[tuple[str, str], list[str]] = {}
    for model in config.models.values():
        for fault in _command(model):
            faults.setdefault(fault, []).append(model.id)
    for (text, mend), names in faults.items():
        yield fail(f"model {', '.join(names)}", text, mend)
    if config.models and not faults:
        yield ok("models", "every program and model file is there")


def _command(model: Model) -> Iterator[tuple[str, str]]:
    """What a model's command lacks, and how to mend it."""
    try:
        launch = model.launch()
    except LaunchError as error:
        yield str(error), "correct its cmd"
        return
    path = os.pathsep.join(
        [launch.env.get("PATH") or os.environ.get("PATH", os.defpath), os.path.join(sys.prefix, "bin")]
    )
    program = launch.argv[0]
    if shutil.which(program, path=path) is None:
        if os.path.dirname(program):
            what = "may not be executed" if os.path.exists(program) else "does not exist"
            yield f"{program} {what}", "correct the path in cmd, or install it there"
        else:
            yield f"{program} is not in PATH", "install it, or write its whole path into cmd"
    wanted = read_command(launch.argv, launch.env)
    for file in (wanted.model, wanted.projector, wanted.draft) if wanted else ():
        if file and os.path.isabs(file) and not os.path.exists(file):
            yield f"{file} does not exist", "correct the path in its cmd"


def cards() -> tuple[Card, ...]:
    """All cards that a driver tells of within DRIVER seconds."""
    found: list[Card] = []
    for source in (Nvml(), Amd()):
        sampler: Sampler[tuple[Card, ...]] = Sampler(f"doctor-{source.name}", source.read, 3600.0)
        sampler.start()
        found += sampler.fresh(DRIVER) or ()
        if sampler.close():
            source.close()
    return tuple(found)


def memory(config: Config | None, found: tuple[Card, ...], ram: int) -> Iterator[Finding]:
    """Budgets against what there is. `ram` is the machine's memory in bytes."""
    total = sum(card.total for card in found)
    if found:
        names = ", ".join(f"{card.name or 'card'} ({size(card.total)} GiB)" for card in found)
        told = all(card.processes is not None for card in found)
        yield ok(
            "GPU",
            names + ("" if told else "; the driver does not tell who uses it: budgets hold, sizes are not learned"),
        )
    else:
        yield ok("GPU", "no driver tells of a card: VRAM is planned by the configured figures alone")
    yield ok("memory", f"{size(ram)} GiB of system memory")
    if config is None:
        return
    if (several := several_cards(config.vram_budget, found)) is not None:
        yield warn("memory", *several)
    yield from _budget("vramBudgetGB", config.vram_budget, total)
    yield from _budget("ramBudgetGB", config.ram_budget, ram)
    unknown = [m.id for m in config.models.values() if not (m.est_ram if m.pool == "ram" else m.est_vram)]
    if unknown and (config.vram_budget or config.ram_budget):
        yield warn(
            "memory",
            f"no size is given for {', '.join(unknown[:5])}: they swap by their groups until they were measured",
            "`qmflask estimate --config FILE` prints estVramGB and estRamGB",
        )


def growth(told: Mapping[str, Any], url: str) -> Iterator[Finding]:
    """What others take of the cards above the least that was ever seen: a game, or a floor from a day without them.

    `told` is what the service at `url` says of memory.
    """
    excess, ceiling = told.get("excess"), told.get("vram_ceiling")
    if not excess or not told.get("trusted") or ceiling is None:
        return
    names = ", ".join(f"{one['name']} {gib(one['bytes'])}" for one in told.get("foreign_processes") or ())
    text = (
        f"other programs hold {gib(excess)} more on the cards than the least that was seen, {gib(told['floor'])}"
        f"{f' ({names})' if names else ''}: {gib(ceiling)} of {gib(told['vram_budget'])} may be used now"
    )
    yield warn("memory", text, f"close them; if it is always like this, learn it anew: POST {url}/api/memory/relearn")


def several_cards(vram_budget: int, found: Sequence[Card]) -> tuple[str, str] | None:
    """What to say of one budget over several cards, and how to mend it; None when there is nothing to say."""
    if not vram_budget or len(found) < 2:
        return None
    each = ", ".join(f"{size(card.total)} GiB" for card in found)
    text = f"one budget covers all {len(found)} cards ({each}): what fits their sum need not fit any one of them"
    return text, "say in each cmd which card a model uses, or how it is split, and leave some room in the budget"


def _budget(key: str, budget: int, total: int) -> Iterator[Finding]:
    if total and budget > total:
        text = f"{key} is {budget / GIB:g}, more than the {size(total)} GiB there are"
        yield warn("memory", text, f"lower {key}")


def ports(config: Config, running: Mapping[str, int]) -> Iterator[Finding]:
    """Ports that others have taken. `running`: ports of models that run, by model."""
    taken = [
        (model.id, model.port)
        for model in config.models.values()
        if model.port is not None and model.port not in running.values() and not port_is_free(model.port)
    ]
    for name, port in taken:
        yield warn(
            "ports",
            f"{port}, the first choice for {name}, is used by {holder_of(port)}; another one will be taken",
            "nothing needs to be done; startPort moves them all",
        )
    if not taken:
        yield ok("ports", "free for every model")


#: What a proxy in front must say: directive, the value that is right, why.
_HINTS = (
    ("proxy_http_version", r"1\.1", "1.1", "with 1.0 a stream that breaks off looks as if it had ended well"),
    ("proxy_buffering", "off", "off", "slow readers are felt by the model, and hang-ups are seen at once"),
    ("proxy_request_buffering", "off", "off", "uploads go through without being stored first"),
    ("proxy_read_timeout", r"\d{4,}s?|\d+[hm]", "3600s", "a load or a long prompt is silent for longer than 60 s"),
    ("client_max_body_size", r"0|\d+[mMgG]", "0", "its default refuses bodies above 1 MB"),
    ("proxy_next_upstream", "off", "off", "a second try would ask the model twice"),
    ("proxy_set_header Upgrade", r"\$http_upgrade", "$http_upgrade", "websockets (ComfyUI) pass only with it"),
)
NGINX_FOLDERS = (Path("/etc/nginx/conf.d"), Path("/etc/nginx/sites-enabled"))


def nginx(folders: Iterable[Path] = NGINX_FOLDERS) -> Iterator[Finding]:
    """Sites that seem to lead here, and what their configuration lacks."""
    for folder in folders:
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            try:
                text = re.sub(r"#.*", "", path.read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
            if "proxy_pass" in text and re.search(r"qmflask|gunicorn|127\.0\.0\.1:8080|localhost:8080", text):
                yield from _site(path, text)


def _site(path: Path, text: str) -> Iterator[Finding]:
    lacking = [hint for hint in _HINTS if not re.search(rf"\b{hint[0]}\s+({hint[1]})\s*;", text)]
    for name, _, value, why in lacking:
        yield warn("nginx", f"{path} has no `{name} {value}`: {why}", "compare with `qmflask example nginx`")
    if not lacking:
        yield ok("nginx", f"{path} has what streams need")
