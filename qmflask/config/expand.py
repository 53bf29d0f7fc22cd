"""From the merged tree to the expanded one: macros, ports, and what must not be left over (compatibility 1.1, 2-9)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from qmflask.config.command import strip_comment_lines
from qmflask.config.decode import is_secret, section_keys
from qmflask.config.environment import is_masked
from qmflask.config.macros import (
    LEFTOVER,
    PID,
    PORT,
    Expander,
    Macros,
    declare,
    hint_for,
    leftovers,
    map_scalars,
    text_of,
)
from qmflask.config.problems import Mark, Path, Problems, dotted, shown
from qmflask.config.schema import RootSection
from qmflask.config.spaces import torn_references
from qmflask.config.yaml12 import Map, Node, Scalar, Seq, YamlError, is_null

DEFAULT_PROXY = "http://localhost:${PORT}"
DEFAULT_START_PORT = 5800
_REFERENCE = "${PORT}"
#: More than anybody has; each takes some 12 KB.
MAX_MODELS = 2000
#: Each model looks through all of them.
MAX_MACROS = 1000

#: Fields whose text says so when `${PORT}` stands there and `cmd` has none.
_SIMPLE = frozenset({"cmd", "cmdStop", "checkEndpoint", "name", "description", "filters.stripParams"})
#: Ways out for a proxy that waits for a port.
_ABOUT_PORT = "put ${PORT} into cmd, or set proxy to the address the server listens on"
_ABOUT_CMD = "it has no cmd: write the command that starts its server; `qmflask check` finds a misspelt key"


@dataclass(slots=True)
class Templates:
    """A model's launch settings after macros, before `${PORT}`; `port` is None when `cmd` has no `${PORT}`."""

    cmd: str = ""
    cmd_stop: str = ""
    proxy: str = ""
    check_endpoint: str = "/health"
    env: tuple[str, ...] = ()
    port: int | None = None


@dataclass(slots=True)
class Expanded:
    """The tree without macros, and each model's templates; `null_models` are models whose whole value was null."""

    root: Map
    templates: dict[str, Templates] = field(default_factory=dict)
    null_models: frozenset[str] = frozenset()
    used_macros: frozenset[str] = frozenset()


def expand(root: Map, problems: Problems) -> Expanded:
    """Expand macros and ports. Problems are noted; raises YamlError when macros grow without bound."""
    declared = root.get("macros")
    if isinstance(declared, Map) and len(declared.entries) > MAX_MACROS:
        raise YamlError(f"more than {MAX_MACROS} macros", declared.mark.line, declared.mark.column, declared.mark.file)
    macros = Macros.of(declare(declared, "", ("macros",), problems))
    models = root.get("models")
    if models is not None and not isinstance(models, Map):
        problems.error("models must be a mapping of ids to settings", models.mark, ("models",), allowed="a mapping")
        models = None
    if models is not None and len(models.entries) > MAX_MODELS:
        mark = models.marks[list(models.entries)[MAX_MODELS]]
        raise YamlError(f"more than {MAX_MODELS} models", mark.line, mark.column, mark.file)
    expander = Expander()
    entries = {
        name: expander.node(value, macros) for name, value in root.entries.items() if name not in ("macros", "models")
    }
    worker = _Models(macros, expander, _start_port(entries.get("startPort")), problems)
    if models is not None:
        entries["models"] = worker.all(models)
    tree = Map(entries, root.marks, root.mark)
    _check_globals(tree, macros, problems)
    nulls = frozenset(name for name, node in models.entries.items() if is_null(node)) if models else frozenset()
    return Expanded(tree, worker.templates, nulls)


def _start_port(node: Node | None) -> int:
    value = node.value if isinstance(node, Scalar) else None
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < 2**31
    return int(value) if usable and value is not None else DEFAULT_START_PORT


def _check_globals(tree: Map, macros: Macros, problems: Problems) -> None:
    known = section_keys(RootSection)
    for name, value in tree.entries.items():
        if name in ("models", "macros") or name not in known:
            continue
        for path, scalar, reference in leftovers(value, (name,)):
            text = f"{dotted(path)}: unknown macro '${{{reference}}}'"
            _unknown_macro(problems, text, scalar, path, reference, macros)


def _unknown_macro(problems: Problems, text: str, scalar: Scalar, path: Path, reference: str, macros: Macros) -> None:
    names = ", ".join(islice(macros.order, 12)) or "none is declared"
    value = None if is_secret(path) else scalar.text
    hint = hint_for(reference, macros, problems)
    problems.error(text, scalar.mark, path, value=value, allowed=f"declared macros: {names}", hint=hint, code="macro")


class _Models:
    """Expands one model after the other, in byte order of their ids, which is the order of their ports."""

    def __init__(self, macros: Macros, expander: Expander, start_port: int, problems: Problems) -> None:
        self.macros, self.expander, self.problems = macros, expander, problems
        self.next_port = start_port
        self.templates: dict[str, Templates] = {}

    def all(self, models: Map) -> Map:
        done: dict[str, Node] = {}
        for model in sorted(models.entries, key=lambda name: name.encode("utf-8", "surrogatepass")):
            done[model] = self.one(model, models.entries[model], models.marks[model])
        return Map({name: done[name] for name in models.entries}, models.marks, models.mark)

    def one(self, model: str, node: Node, mark: Mark) -> Node:
        if not isinstance(node, Map):
            self.templates[model] = Templates()
            return node
        path: Path = ("models", model)
        prefix = f"model {shown(model)}: "
        own = declare(node.get("macros"), prefix, (*path, "macros"), self.problems)
        macros = self.macros.with_model(model, own)
        node = self._prepared(node)
        self._warn_of_spaces(node, macros, path)
        expanded = self.expander.node(node, macros)
        assert isinstance(expanded, Map)
        self._override_keys(expanded, model, macros)
        templates = self._templates(expanded)
        self.templates[model] = templates
        if _REFERENCE in templates.cmd:
            templates.port = self.next_port
            self.next_port += 1
            port = templates.port
            filled = map_scalars(expanded, lambda scalar: _with_port(scalar, port))
            assert isinstance(filled, Map)
            expanded = filled
        self._check(expanded, model, macros, templates, mark)
        return expanded

    def _warn_of_spaces(self, node: Map, macros: Macros, path: Path) -> None:
        """References that are replaced before the command is split, and then are several arguments."""
        for name in ("cmd", "cmdStop"):
            value = node.entries.get(name)
            if not isinstance(value, Scalar) or not isinstance(value.value, str):
                continue
            for torn in torn_references(value.value, macros, value.mark):
                reference = f"${{{torn.name}}}"
                self.problems.warning(
                    f"{reference} has a space and stands outside quotes: it becomes {torn.count} arguments",
                    value.mark,
                    (*path, name),
                    code="spaces",
                    allowed="one argument",
                    hint=f'write "{reference}", in double quotes',
                )

    @staticmethod
    def _prepared(node: Map) -> Map:
        entries = {name: value for name, value in node.entries.items() if name != "macros"}
        for name in ("cmd", "cmdStop"):
            value = entries.get(name)
            if isinstance(value, Scalar) and isinstance(value.value, str):
                text = strip_comment_lines(value.value)
                entries[name] = Scalar(text, text, value.plain, value.mark)
        marks = node.marks
        if is_null(entries.get("proxy")):
            entries["proxy"] = Scalar(DEFAULT_PROXY, DEFAULT_PROXY, False, node.mark)
            marks = {**marks, "proxy": node.mark}
        return Map(entries, marks, node.mark)

    def _override_keys(self, node: Map, model: str, macros: Macros) -> None:
        """Expand the keys of `filters.setParamsByID`, the only keys that may hold macros."""
        filters = node.entries.get("filters")
        by_id = filters.entries.get("setParamsByID") if isinstance(filters, Map) else None
        if not isinstance(by_id, Map) or not any("${" in key for key in by_id.entries):
            return
        assert isinstance(filters, Map)
        entries: dict[str, Node] = {}
        marks: dict[str, Mark] = {}
        for key, value in by_id.entries.items():
            mark = by_id.marks[key]
            path = ("models", model, "filters", "setParamsByID", key)
            name = text_of(self.expander.text(key, macros, mark))
            if name in entries:
                text = f"model {shown(model)} filters.setParamsByID: two keys resolve to the same value {shown(name)!r}"
                self.problems.error(text, mark, path, value=key, allowed="each id once")
                continue
            entries[name], marks[name] = value, mark
            for _path, _scalar, left in leftovers(Scalar(name, name, False, mark)):
                text = f"unknown macro '${{{left}}}' found in model {shown(model)} filters.setParamsByID key"
                _unknown_macro(self.problems, text, Scalar(key, key, False, mark), path, left, macros)
        new = Map({**filters.entries, "setParamsByID": Map(entries, marks, by_id.mark)}, filters.marks, filters.mark)
        node.entries["filters"] = new

    @staticmethod
    def _templates(node: Map) -> Templates:
        def text(name: str, default: str) -> str:
            value = node.entries.get(name)
            usable = isinstance(value, Scalar) and value.value is not None
            return text_of(value.value) if usable and isinstance(value, Scalar) else default

        env = node.entries.get("env")
        items = env.items if isinstance(env, Seq) else []
        return Templates(
            cmd=text("cmd", ""),
            cmd_stop=text("cmdStop", ""),
            proxy=text("proxy", ""),
            check_endpoint=text("checkEndpoint", "/health"),
            env=tuple(text_of(item.value) for item in items if isinstance(item, Scalar)),
        )

    def _check(self, node: Map, model: str, macros: Macros, templates: Templates, mark: Mark) -> None:
        path: Path = ("models", model)
        name = shown(model)
        if _REFERENCE in templates.proxy and templates.port is None and _is_known(node.entries.get("cmd")):
            place = node.entries["proxy"].mark if node.entries["proxy"].mark != node.mark else mark
            self.problems.error(
                f"model {name}: proxy uses ${{PORT}} but cmd does not",
                place,
                (*path, "proxy"),
                value=templates.proxy,
                hint=_ABOUT_PORT if templates.cmd else _ABOUT_CMD,
            )
        for field_path, scalar, left in leftovers(node):
            if field_path == ("proxy",) and left == PORT:
                continue
            if field_path == ("cmdStop",) and left == PID:
                continue
            text = _leftover(name, field_path, left)
            _unknown_macro(self.problems, text, scalar, (*path, *field_path), left, macros)


def _is_known(cmd: Node | None) -> bool:
    """Whether a command's text is certain; where it is wrong itself, what follows from it is not worth a word."""
    if cmd is None:
        return True
    return isinstance(cmd, Scalar) and not is_masked(cmd.text) and not LEFTOVER.search(cmd.text)


def _with_port(scalar: Scalar, port: int) -> Scalar:
    if scalar.value == _REFERENCE:
        return Scalar(port, str(port), False, scalar.mark)
    text = scalar.value.replace(_REFERENCE, str(port))
    return Scalar(text, text, False, scalar.mark)


def _leftover(model: str, path: Path, name: str) -> str:
    where = dotted(path)
    if name == PORT and where in _SIMPLE:
        return f"model {model} {where}: macro '${{PORT}}' should have been substituted in {model}.{where}"
    place = str(path[0]) if path[0] in ("capabilities", "metadata") else where
    return f"model {model} {place}: unknown macro '${{{name}}}' found in {model}.{where}"
