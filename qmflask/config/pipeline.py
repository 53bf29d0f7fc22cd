"""Text in, configuration out: the pipeline of compatibility 1.1, with every problem of every file in one report."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from qmflask.config import environment
from qmflask.config.build import build
from qmflask.config.context import Context
from qmflask.config.decode import decode, section_keys, unknown_keys
from qmflask.config.expand import Expanded, expand
from qmflask.config.lint import lint
from qmflask.config.merge import merge_files
from qmflask.config.problems import ConfigError, Mark, Path, Problem, Problems, shown, shown_path
from qmflask.config.report import Loaded, Report, Source
from qmflask.config.resolved import Config
from qmflask.config.schema import Section
from qmflask.config.yaml12 import Map, Node, Seq, YamlError, locate
from qmflask.config.yaml12 import build as build_tree

#: A line that may hold a secret is not repeated in a message.
_SECRET = re.compile("key|token|secret|passw", re.IGNORECASE)
#: What may ask the file system about `store.path`; see `qmflask.configfiles.path_fault`.
PathFault = Callable[[str], str | None]


def load(
    sources: Sequence[Source],
    environ: Mapping[str, str],
    *,
    strict: bool = False,
    path_fault: PathFault | None = None,
) -> Loaded:
    """The configuration of the sources, merged in order.

    `strict` makes unknown keys errors, as `strict: true` in the file does. Raises ConfigError with all problems.
    """
    report = analyse(sources, environ, strict=strict, path_fault=path_fault)
    if report.errors or report.config is None:
        raise ConfigError(report.errors)
    return Loaded(report.config, report.warnings)


def analyse(
    sources: Sequence[Source],
    environ: Mapping[str, str],
    *,
    strict: bool = False,
    path_fault: PathFault | None = None,
) -> Report:
    """Everything that can be said about the sources; raises nothing."""
    problems = Problems()
    config: Config | None = None
    try:
        root = _tree(sources, environ, problems)
        _with_paths(problems, root)
        config = _resolve(root, environ, strict, problems, path_fault)
    except YamlError as error:
        problems.error(str(error), error.mark(sources[0].name if sources else ""))
    if config is not None and any(problem.code == "env" for problem in problems.found):
        config = Config.from_json(environment.unmasked(config.to_json().decode()).encode())
    errors = tuple(p for p in problems.errors if not environment.is_masked(p.message + p.path))
    warnings = tuple(p for p in problems.warnings if not environment.is_masked(p.message + p.path))
    return Report(config, _named(errors, sources), _named(warnings, sources))


def _named(problems: Sequence[Problem], sources: Sequence[Source]) -> tuple[Problem, ...]:
    """Problems without a place get the name of the only file there is."""
    only = sources[0].name if len(sources) == 1 else ""
    return tuple(problem if problem.file or not only else replace(problem, file=only) for problem in problems)


def _tree(sources: Sequence[Source], environ: Mapping[str, str], problems: Problems) -> Map:
    trees: list[Node] = []
    for source in sources:
        try:
            stream = environment.read(source.text, source.name, environ, problems)
            tree = build_tree(stream, source.name, problems)
        except YamlError as error:
            line = _line(source.text, error.line)
            problems.error(str(error), error.mark(source.name), value=line, allowed="YAML 1.2", code="yaml")
            continue
        if tree is not None:
            trees.append(tree)
    name = sources[0].name if sources else ""
    return merge_files(trees, problems) or Map({}, {}, Mark(name, 1, 1))


def _line(text: str, number: int) -> str | None:
    """The line of a syntax error, unless it looks like a secret's."""
    if number < 1:
        return None
    line = next(islice(_lines(text), number - 1, None), "").strip()
    return None if not line or _SECRET.search(line) else line


def _lines(text: str) -> Iterator[str]:
    """The lines of a text one by one, so that a huge one is not split for one line."""
    at = 0
    while at <= len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        yield text[at:end]
        at = end + 1


def _resolve(
    root: Map, environ: Mapping[str, str], strict: bool, problems: Problems, path_fault: PathFault | None
) -> Config:
    expanded = expand(root, problems)
    sections = decode(expanded.root, problems)
    _note_unknown(expanded, strict or sections.strict, problems)
    context = Context(sections, expanded, problems, path_fault)
    config = build(context)
    lint(context, config, environ)
    return config


def _note_unknown(expanded: Expanded, strict: bool, problems: Problems) -> None:
    for path, section in unknown_keys(expanded.root):
        key = str(path[-1])
        mark = locate(expanded.root, path, key=True)
        reason = section.legacy.get(key)
        if reason is not None:
            problems.warning(
                f"the key {key!r} does nothing: {reason}",
                mark,
                path,
                value=key,
                allowed=_listed(section),
                code="legacy_key",
            )
            continue
        note = problems.error if strict else problems.warning
        text = f"unknown key {shown(key)!r}"
        close = next(iter(problems.guess(key, section_keys(section))), None)
        hint = f"did you mean {close}?" if close else None
        allowed = close or _listed(section)
        note(text, mark, path, value=key, allowed=allowed, hint=hint, code="unknown_key")


def _listed(section: type[Section]) -> str:
    keys = list(section_keys(section))
    return f"{', '.join(keys[:12])}{', ...' if len(keys) > 12 else ''}"


def _with_paths(problems: Problems, root: Map) -> None:
    """Give each problem that was found in the text the dotted path of what stands at its place."""
    if all(problem.path or not problem.line for problem in problems.found):
        return
    places = sorted(_places(root, ()), key=lambda place: place[:3])
    marks = [Mark(*place[:3]) for place in places]
    for number, problem in enumerate(problems.found):
        if not problem.path and problem.line:
            mark = problem.near or Mark(problem.file, problem.line, problem.column)
            at = bisect_right(marks, mark) - 1
            if at >= 0 and places[at][0] == problem.file:
                problems.found[number] = replace(problem, path=shown_path(places[at][3]))
                if problem.severity == "error" and problem.near is None:
                    problems.fail(places[at][3])


def _places(node: Node, path: Path) -> Iterator[tuple[str, int, int, Path]]:
    yield (*node.mark, path)
    if isinstance(node, Map):
        for key, value in node.entries.items():
            yield (*node.marks[key], (*path, key))
            yield from _places(value, (*path, key))
    elif isinstance(node, Seq):
        for number, item in enumerate(node.items):
            yield from _places(item, (*path, number))
