"""The layers of the code (DESIGN section 2), read from its imports: who may use whom, and where the outside lives."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

#: The layer of each module or package under `qmflask`. A package stands for all its modules; its own modules may
#: import one another, in no circle. A new module needs a line here: choose the lowest layer it can live in.
LAYERS: dict[int, set[str]] = {
    0: {"errors", "states"},
    1: {"config", "names", "policy", "memory", "bodies", "headers", "usage", "http1"}
    | {"jsonedit", "multipart", "filters", "captures"},
    2: {
        "store",
        "wake",
        "places",
        "bell",
        "election",
        "proctree",
        "ports",
        "processes",
        "probes",
        "sampling",
        "gpu",
        "host",
        "upstream",
        "pooled",
        "exchange",
        "forwardproxy",
        "hangup",
        "pump",
        "logfiles",
        "configfiles",
        "configreader",
        "modelfiles",
        "askserver",
        "endings",
        "siege",
        "ballast",
        "spawnrecords",
        "writelock",
        "intake",
        "journal",
        "accesslog",
        "slots",
        "logtail",
        "timedsocket",
        "rush",
        "crew",
        "plain",
    },
    3: {
        "configuration",
        "meter",
        "hints",
        "accounts",
        "trees",
        "starts",
        "rebuild",
        "swaps",
        "commands",
        "inforce",
        "term",
        "leader",
        "leases",
        "desk",
        "roster",
        "departures",
        "router",
        "relay",
        "recording",
        "overview",
        "activity",
        "shutdown",
        "runtime",
    },
    4: {"web", "app"},
    5: {"cli", "demo", "gunicorn_conf", "worker"},
}

#: (importer, imported) within one layer, each a decision; everything else goes downwards.
SAME_LAYER: set[tuple[str, str]] = {
    ("http1", "headers"),
    ("bodies", "jsonedit"),
    ("filters", "jsonedit"),
    ("captures", "headers"),
    ("accesslog", "journal"),
    ("policy", "config"),
    ("policy", "memory"),
    ("config", "policy"),  # the matrix's expressions are checked by the parser that will read them
    ("config", "policy"),  # checking a matrix compiles it; `policy.matrix` knows nothing of configuration
    ("names", "config"),
    ("memory", "config"),
    ("ports", "proctree"),
    ("processes", "proctree"),
    ("processes", "ports"),
    ("configreader", "configfiles"),
    ("upstream", "hangup"),
    ("crew", "hangup"),
    ("crew", "timedsocket"),
    ("upstream", "exchange"),
    ("upstream", "pooled"),
    ("pooled", "exchange"),
    ("exchange", "hangup"),
    ("exchange", "timedsocket"),
    ("rush", "timedsocket"),
    ("upstream", "rush"),
    ("upstream", "timedsocket"),
    ("exchange", "forwardproxy"),
    ("upstream", "forwardproxy"),
    ("pump", "hangup"),
    ("pump", "bell"),
    ("gpu", "sampling"),
    ("askserver", "endings"),
    ("askserver", "processes"),
    ("siege", "processes"),
    ("spawnrecords", "processes"),
    ("writelock", "processes"),
    ("leader", "rebuild"),
    ("trees", "starts"),
    ("accounts", "meter"),
    ("swaps", "accounts"),
    ("swaps", "meter"),
    ("swaps", "trees"),
    ("term", "inforce"),
    ("commands", "inforce"),
    ("swaps", "inforce"),
    ("term", "accounts"),
    ("term", "meter"),
    ("term", "swaps"),
    ("term", "commands"),
    ("term", "trees"),
    ("leader", "term"),
    ("leader", "trees"),
    ("leader", "commands"),
    ("leader", "configuration"),
    ("journal", "logfiles"),
    ("logtail", "journal"),
    ("logtail", "logfiles"),
    ("recording", "relay"),
    ("activity", "recording"),
    ("router", "activity"),
    ("leases", "configuration"),
    ("desk", "configuration"),
    ("desk", "leases"),
    ("router", "desk"),
    ("router", "roster"),
    ("router", "leases"),
    ("router", "departures"),
    ("departures", "leases"),
    ("router", "leader"),
    ("router", "commands"),
    ("router", "configuration"),
    ("runtime", "router"),
    ("runtime", "shutdown"),
    ("shutdown", "trees"),
    ("app", "web"),
}

#: The only modules that may import these; what is not listed may be imported anywhere above layer 1.
HOMES: dict[str, set[str]] = {
    "requests": {"pooled"},
    "urllib3": {"pooled"},
    "sqlite3": {"store", "activity"},
    "filelock": {"election"},
    "subprocess": {"processes", "host", "configreader"},
    "psutil": {"processes", "host"},
    "pynvml": {"gpu"},
    "flask": {"web", "app"},
    "werkzeug": {"web", "app", "bodies"},
    "yaml": {"config"},
    "pydantic": {"config"},
    "gguf": {"memory"},
    "click": {"cli"},
    "prometheus_client": {"web"},
    "gunicorn": {"worker"},
}

#: Neither a clock nor the outside in layers 0 and 1: values in, values out.
IMPURE = {
    "os",
    "io",
    "time",
    "random",
    "secrets",
    "socket",
    "select",
    "selectors",
    "threading",
    "subprocess",
    "sqlite3",
}
IMPURE |= {"signal", "fcntl", "shutil", "tempfile", "pathlib", "asyncio", "multiprocessing", "queue", "logging"}

#: Calls that would make a thread, socket, lock file or connection; gunicorn forks, so none at module level.
MAKERS = {"Thread", "Timer", "ThreadPoolExecutor", "socket", "socketpair", "create_connection", "connect", "open"}
MAKERS |= {"FileLock", "Popen", "epoll", "poll", "pipe", "eventfd", "pidfd_open", "HTTPAdapter", "Session"}

BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}

LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}


def modules(root: Path = REPO) -> dict[str, Path]:
    """Dotted name below `qmflask` ("" is the package itself) -> file."""
    found = {}
    for path in sorted((root / "qmflask").rglob("*.py")):
        parts = path.relative_to(root / "qmflask").with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


MODULES = modules()


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    """Full dotted names a module imports, wherever the statement stands; relative ones resolved."""
    package = (
        ["qmflask", *name.split(".")] if MODULES[name].name == "__init__.py" else ["qmflask", *name.split(".")][:-1]
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" if base.startswith("qmflask") else base for alias in node.names)


def parse(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def own_imports(name: str) -> set[str]:
    """Modules of ours that a module imports, without the `qmflask.` before them."""
    found = set()
    for target in imports(name, parse(name)):
        if target.startswith("qmflask."):
            parts = target.split(".")[1:]
            # `from qmflask.errors import NotFound` names the class: cut down to what is a module.
            while parts and ".".join(parts) not in MODULES:
                parts.pop()
            if parts:
                found.add(".".join(parts))
    return found - {name}


def top(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("name", [n for n in MODULES if n])
def test_every_module_has_a_layer(name: str) -> None:
    assert top(name) in LAYER_OF, f"add {top(name)!r} to LAYERS in {Path(__file__).name}"
    assert not BANNED_NAMES & set(name.split(".")), f"{name}: name it after what it does"


@pytest.mark.parametrize("name", [n for n in MODULES if n])
def test_imports_go_downwards(name: str) -> None:
    mine = top(name)
    for target in own_imports(name):
        theirs = top(target)
        allowed = theirs == mine or LAYER_OF[theirs] < LAYER_OF[mine] or (mine, theirs) in SAME_LAYER
        assert allowed, f"{name} (layer {LAYER_OF[mine]}) imports {target} (layer {LAYER_OF[theirs]})"


def test_no_module_imports_in_a_circle() -> None:
    graph = {name: own_imports(name) for name in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", [n for n in MODULES if n])
def test_third_parties_stay_at_home(name: str) -> None:
    for target in imports(name, parse(name)):
        home = HOMES.get(top(target))
        assert home is None or top(name) in home, f"{name} imports {target}, which belongs to {sorted(home)}"


@pytest.mark.parametrize("name", [n for n in MODULES if n and LAYER_OF.get(top(n), 9) <= 1])
def test_pure_layers_have_neither_clock_nor_outside(name: str) -> None:
    for target in imports(name, parse(name)):
        assert top(target) not in IMPURE, f"{name} imports {target}: pure modules are given values, time included"


def module_level_calls(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls that run at import: those outside of functions, class bodies included."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Call):
            yield node
        waiting.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("name", list(MODULES))
def test_nothing_is_opened_at_import(name: str) -> None:
    for call in module_level_calls(parse(name)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        assert called not in MAKERS, f"{name}:{call.lineno} calls {called}() at import; gunicorn forks after it"


@pytest.mark.parametrize("name", list(MODULES))
def test_first_line_states_the_responsibility(name: str) -> None:
    first = (ast.get_docstring(parse(name)) or "").splitlines()[:1]
    assert first and first[0].strip(), f"{name or 'qmflask'}: the first line says what it is for"


def test_the_table_is_consistent() -> None:
    for one, other in itertools.combinations(LAYERS.values(), 2):
        assert not one & other
    for importer, imported in SAME_LAYER:
        assert LAYER_OF[importer] == LAYER_OF[imported], f"{importer}, {imported}: not of one layer"
    assert set().union(*HOMES.values()) <= set(LAYER_OF)


def test_modules_are_found() -> None:
    """Else all of the above would pass on an empty tree."""
    assert {"errors", "states", "policy.eviction"} <= set(MODULES)
    assert "states" in own_imports("policy.snapshot")
