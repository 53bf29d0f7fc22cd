"""Several files into one tree, by the rules of a configuration directory (compatibility 1.15)."""

from __future__ import annotations

from collections.abc import Sequence

from qmflask.config.problems import Path, Problems, dotted, shown
from qmflask.config.yaml12 import Map, Node, Scalar, Seq

#: Mappings whose children have an identity: one child may not come from two files.
_IDENTITY: dict[Path, str] = {
    ("models",): "models",
    ("groups",): "groups",
    ("profiles",): "profiles",
    ("selectors",): "selectors",
    ("peers",): "peers",
    ("matrix",): "matrix",
    ("routing", "router", "settings", "groups"): "routing.router.settings.groups",
    ("routing", "router", "settings", "matrix"): "routing.router.settings.matrix",
}


def merge_files(trees: Sequence[Node], problems: Problems) -> Map | None:
    """One tree of the files' trees, in order; None when no file holds a mapping."""
    root: Map | None = None
    for tree in trees:
        if isinstance(tree, Seq):
            problems.error(
                "top-level YAML must be a mapping of keys, not a list", tree.mark, allowed="key: value lines"
            )
        elif isinstance(tree, Scalar):
            if tree.value is not None:
                text = "the file holds a single value and no keys, so it is ignored"
                problems.warning(text, tree.mark, value=tree.text, allowed="key: value lines", code="ignored_file")
        elif root is None:
            root = tree
        else:
            root = _maps(root, tree, (), problems)
    return root


def _merge(first: Node, second: Node, path: Path, problems: Problems) -> Node:
    if path in _IDENTITY and not (isinstance(first, Map) and isinstance(second, Map)):
        bad = first if not isinstance(first, Map) else second
        name = _IDENTITY[path]
        text = f"{name}: expected a mapping in every file that has the key; remove it where it is empty"
        problems.error(text, bad.mark, path, allowed="a mapping")
        return second if isinstance(second, Map) else first
    if _blank(second):
        return first
    if _blank(first):
        return second
    if isinstance(first, Map) and isinstance(second, Map):
        return _maps(first, second, path, problems)
    if isinstance(first, Seq) and isinstance(second, Seq):
        return Seq([*first.items, *second.items], first.mark)
    if isinstance(first, Scalar) and isinstance(second, Scalar):
        _same_scalar(first, second, path, problems)
        return first
    text = (
        f"incompatible YAML node kinds at {dotted(path)!r}: {_kind(first)} in {first.mark.file}, {_kind(second)} here"
    )
    problems.error(text, second.mark, path, allowed=_kind(first))
    return first


def _blank(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value is None and node.text == ""


def _kind(node: Node) -> str:
    return "a mapping" if isinstance(node, Map) else "a list" if isinstance(node, Seq) else "a value"


def _same_scalar(first: Scalar, second: Scalar, path: Path, problems: Problems) -> None:
    if first.text == second.text and type(first.value) is type(second.value):
        return
    text = f'conflict at "{dotted(path)}": {first.mark.file} line {first.mark.line} has another value'
    problems.error(text, second.mark, path, allowed="the same value, or the key in one file only")


def _maps(first: Map, second: Map, path: Path, problems: Problems) -> Map:
    entries, marks = dict(first.entries), dict(first.marks)
    for key, value in second.entries.items():
        if key not in entries:
            entries[key], marks[key] = value, second.marks[key]
        elif not path and key.startswith("x-"):
            continue  # free for notes and anchors, and anchors belong to their own file
        elif path in _IDENTITY:
            text = f'duplicate {_IDENTITY[path]} "{shown(key)}" found in {second.mark.file}'
            other = f"it is already in {first.marks[key].file} line {first.marks[key].line}"
            problems.error(text, second.marks[key], (*path, key), value=key, allowed="each key in one file", hint=other)
        else:
            entries[key] = _merge(entries[key], value, (*path, key), problems)
    return Map(entries, marks, first.mark)
