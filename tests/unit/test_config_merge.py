"""Several files: what is merged, what is refused, and how files and folders are read (compatibility 1.15)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qmflask.config import Config, ConfigError, Source, load
from qmflask.configfiles import (
    fingerprint,
    forget_resolved,
    load_path,
    path_fault,
    read_resolved,
    read_sources,
    write_resolved,
)

M = "models: {{{}: {{cmd: 'r ${{PORT}}'}}}}\n"


def merged(*texts: str) -> Config:
    return load([Source(f"{number}.yaml", text) for number, text in enumerate(texts)], {}).config


def errors(*texts: str) -> str:
    with pytest.raises(ConfigError) as caught:
        merged(*texts)
    return str(caught.value)


@pytest.mark.parametrize(
    ("first", "second", "part"),
    [
        (M.format("a"), M.format("a"), 'duplicate models "a" found in 1.yaml'),
        ("groups: {g: {}}", "groups: {g: {}}", 'duplicate groups "g" found in 1.yaml'),
        ("peers: {p: ~}", "peers: {p: ~}", 'duplicate peers "p"'),
        ("profiles: {p: {}}", "profiles: {p: {}}", 'duplicate profiles "p"'),
        ("selectors: {p: {}}", "selectors: {p: {}}", 'duplicate selectors "p"'),
        ("matrix: {vars: {a: b}}", "matrix: {vars: {c: d}}", 'duplicate matrix "vars"'),
        (
            "routing: {router: {settings: {groups: {g: {}}}}}",
            "routing: {router: {settings: {groups: {g: {}}}}}",
            'duplicate routing.router.settings.groups "g"',
        ),
        (M.format("a"), "models:\n", "expected a mapping"),
        ("models: ~\n", M.format("a"), "expected a mapping"),
        ("apiKeys: [a]", "apiKeys: b", "incompatible YAML node kinds"),
        ("ui: {activity: {}}", "ui: 5", "incompatible YAML node kinds"),
        ("logLevel: info", "logLevel: ~", 'conflict at "logLevel"'),
        ("globalTTL: 5", "globalTTL: '5'", 'conflict at "globalTTL"'),
        ("macros: {a: 1}", "macros: {a: 2}", 'conflict at "macros.a"'),
        ("hooks: {on_startup: 5}", "hooks: {on_startup: 6}", 'conflict at "hooks.on_startup"'),
        ("- a", "b: c", "top-level YAML must be a mapping"),
    ],
)
def test_conflicts(first: str, second: str, part: str) -> None:
    assert part in errors(first, second)


def test_conflicts_name_both_places() -> None:
    message = errors("a: 1\nlogLevel: info", "x-y: 1\n\nlogLevel: debug")
    assert message.startswith('1.yaml:3:11: logLevel: conflict at "logLevel"') and "0.yaml line 2" in message


def test_what_is_merged() -> None:
    found = merged(
        "apiKeys: [a]\nhooks: {on_startup: {preload: [m]}}\nlogLevel: debug\nlogTimeFormat:\nmacros: {x: 1}\n"
        + M.format("m"),
        "apiKeys: [a, b]\nhooks: {on_startup: {preload: [n]}}\nlogLevel: 'debug'\nlogTimeFormat: stamp\n"
        "macros: {y: '${x}2'}\nmodels: {n: {cmd: 'r ${PORT} ${y}'}}",
        "just a word",
        "",
        "matrix: {sets: {s: m}}",
        "matrix: {vars: {q: n}}",
    )
    assert [key.key for key in found.api_keys] == ["a", "a", "b"] and found.preload == ("m", "n")
    assert found.models["n"].cmd == "r 5801 12" and found.log_time_format == "stamp"
    assert found.matrix is not None and found.matrix.vars == {"q": "n"}


def test_anchors_belong_to_their_file() -> None:
    found = merged(
        "x-a: &k {ttl: 1}\nmodels: {a: {<<: *k, cmd: '${PORT}'}}",
        "x-b: &k {ttl: 2}\nmodels: {b: {<<: *k, cmd: '${PORT}'}}",
    )
    assert (found.models["a"].ttl, found.models["b"].ttl) == (1, 2)
    assert "1.yaml:1:6" in errors("x-a: &k {ttl: 1}", "x-b: *k")


def test_problems_of_all_files_come_at_once() -> None:
    message = errors("logLevel: [x]\n", "startPort: 0\n", "a: b: c\n", "apiKeys: ['']\n")
    assert [line.split(":")[0] for line in message.splitlines()] == ["2.yaml", "0.yaml", "1.yaml", "3.yaml"] or all(
        f"{number}.yaml:" in message for number in range(4)
    )


def test_folder_rules(tmp_path: Path) -> None:
    for name in ("b.yml", "a.yaml", ".hid.yaml", "c.YAML", "d.json", "e.yaml.bak"):
        (tmp_path / name).write_text("", encoding="utf-8")
    (tmp_path / "sub.yaml").mkdir()
    assert [Path(source.name).name for source in read_sources(tmp_path)] == [".hid.yaml", "a.yaml", "b.yml"]
    empty = tmp_path / "sub.yaml"
    with pytest.raises(ConfigError, match="no configuration sources found"):
        read_sources(empty)
    with pytest.raises(ConfigError, match="is also present in -config-dir"):
        read_sources(tmp_path / "a.yaml", tmp_path)
    other = tmp_path.parent / f"{tmp_path.name}.yaml"
    other.write_text("startPort: 7000", encoding="utf-8")
    assert read_sources(other, tmp_path)[0].name == str(other)
    assert load_path(tmp_path, {}).config == Config()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_sources(tmp_path / "none.yaml")
    (tmp_path / "bin.yaml").write_bytes(b"a: 1\nb: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"bin\.yaml:2:1: the file is not UTF-8"):
        read_sources(tmp_path / "bin.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_sources(tmp_path / "pipe.yaml")
    (tmp_path / "wide.yaml").write_bytes("startPort: 7000".encode("utf-16"))
    assert load_path(tmp_path / "wide.yaml", {}).config.start_port == 7000


def test_store_path_is_asked_of_the_file_system(tmp_path: Path) -> None:
    assert path_fault(str(tmp_path / "new.db")) is None
    for path, part in ((tmp_path, "is a directory"), (tmp_path / "no" / "x.db", "not writable")):
        (tmp_path / "c.yaml").write_text(f"store: {{path: '{path}'}}", encoding="utf-8")
        with pytest.raises(ConfigError, match=part):
            load_path(tmp_path / "c.yaml", {})


def test_fingerprint_notices_edits_renames_and_moved_links(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "c.yaml").write_text("a: 1", encoding="utf-8")
    link, path = tmp_path / "data", tmp_path / "data" / "c.yaml"
    assert fingerprint(path) == ()
    link.symlink_to("one")
    marks = [fingerprint(path)]
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").replace(link)
    marks.append(fingerprint(path))
    (tmp_path / "two" / "other").write_text("a: 1", encoding="utf-8")
    stats = path.stat()
    os.utime(tmp_path / "two" / "other", ns=(stats.st_atime_ns, stats.st_mtime_ns))
    (tmp_path / "two" / "other").replace(tmp_path / "two" / "c.yaml")
    marks.append(fingerprint(path))
    path.write_text("a: 12", encoding="utf-8")
    marks += [fingerprint(path), fingerprint(link)]
    (tmp_path / "two" / "d.yaml").write_text("", encoding="utf-8")
    marks.append(fingerprint(link))
    assert marks[3] == marks[4] and len({*marks}) == 5
    assert fingerprint(path) == fingerprint(path)


def test_resolved_file_is_private_and_whole(tmp_path: Path) -> None:
    config = merged(M.format("a"), "apiKeys: [k]")
    path = write_resolved(tmp_path, 7, config)
    assert path.name == "config-7.json" and path.stat().st_mode & 0o777 == 0o600
    assert read_resolved(tmp_path, 7) == config
    assert [entry.name for entry in tmp_path.iterdir()] == ["config-7.json"]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="JSON"):
        read_resolved(tmp_path, 7)
    with pytest.raises(OSError, match="config-8"):
        read_resolved(tmp_path, 8)


def test_old_resolved_files_go_for_they_may_hold_keys(tmp_path: Path) -> None:
    config = merged(M.format("a"))
    for generation in (1, 2, 7, 8, 9, 10, 11, 57):
        write_resolved(tmp_path, generation, config)
    (tmp_path / "config-x.json").touch()
    forget_resolved(tmp_path, 10)
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {"config-x.json", *(f"config-{generation}.json" for generation in (7, 8, 9, 10, 11))}
