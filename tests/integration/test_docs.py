"""README and docs do what they say: commands run with the output shown, configurations load, links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from qmflask.app import app
from qmflask.config import Source, load
from tests.integration.conftest import StartService
from tests.service import PATIENCE, REPO, Service, eventually
from tests.unit.test_layering import LAYERS

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (REPO / "docs").glob("*.md"))]
#: What a page may show without its being run, beside blocks marked `not-run`: these are what the tests themselves do
#: (test_packaging, and the service that the other commands of the page talk to).
ELSEWHERE = {"make run", "make test", "python3 -m venv .venv", ".venv/bin/pip install .", ".venv/bin/qmflask serve"}
ADDRESS = "127.0.0.1:8080"


@dataclass(frozen=True)
class Block:
    """One fenced block: where it is, what it is, and its text."""

    page: str
    line: int
    language: str
    marks: str
    text: str

    def steps(self) -> Iterator[tuple[str, str]]:
        """(command, the output shown), for `$ ` lines."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield re.sub(r"\s{2,}#.*", "", command).strip(), output


def blocks(page: str) -> list[Block]:
    found, start, info, lines = [], 0, "", []
    for number, line in enumerate((REPO / page).read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif not start:
            start, info, lines = number, line[3:].strip(), []
        else:
            language, _, marks = info.partition(" ")
            found.append(Block(page, start, language, marks, "\n".join(lines) + "\n"))
            start = 0
    assert not start, f"{page}:{start}: the block is never closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
OF_COMMANDS = [block for block in BLOCKS if block.language in ("console", "sh", "bash", "shell")]


def named(block: Block) -> str:
    return f"{block.page}:{block.line}"


def is_configuration(block: Block) -> bool:
    """YAML of ours. Marked `served` it is in force for what follows on its page; with a name, it is a file there."""
    return block.language == "yaml" and (block.marks in ("", "served") or block.marks.endswith(".yaml"))


@pytest.mark.parametrize("block", [b for b in BLOCKS if is_configuration(b)], ids=named)
def test_configurations_load(block: Block) -> None:
    environ = {name: f"value-{name}" for name in re.findall(r"\$\{env\.(\w+)\}", block.text)}
    loaded = load([Source(named(block), block.text)], environ, strict=True)
    assert not [warning for warning in loaded.warnings if warning.code != "no_models"]  # a piece may have none


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=named)
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", OF_COMMANDS, ids=named)
def test_commands_are_shown_with_a_prompt(block: Block) -> None:
    assert block.marks in ("", "not-run")
    assert block.text.startswith("$ "), "commands begin with `$ `, or nothing of the block is tested"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (REPO / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (REPO / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    assert [page for page in PAGES if page != "README.md" and f"({page})" not in readme] == []


# --- the design -------------------------------------------------------------------------------------------------

DESIGN = (REPO / "docs" / "design.md").read_text(encoding="utf-8")


def test_the_layers_of_the_page_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\d) \w+ \| (.*?) \|", DESIGN, re.MULTILINE)
    shown = {int(number): set(re.findall(r"`(\w+)/?`", modules)) for number, modules in rows}
    assert shown.keys() == LAYERS.keys()
    assert {number: names - LAYERS[number] for number, names in shown.items() if names - LAYERS[number]} == {}
    assert sum(map(len, shown.values())) > 50


def test_what_the_design_names_is_there() -> None:
    names = re.findall(r"`([\w/]+(?:\.(?:py|yaml)|/))`", DESIGN)
    lost = [name for name in names if not ((REPO / "qmflask" / name).exists() or (REPO / name).exists())]
    tests = re.findall(r"`(test_[\w*]+)`", DESIGN)
    assert lost + [name for name in tests if not list((REPO / "tests").glob(f"*/{name}.py"))] == []
    assert len(names) > 20 and len(tests) > 15


# --- routes ---------------------------------------------------------------------------------------------------

#: What only a browser asks for.
OF_THE_PAGE = ("/", "/ui", "/ui/", "/ui/<path:path>", "/ui/static/<digest>/<name>", "/favicon.ico", "/upstream")


def asked(command: str) -> tuple[str, str]:
    """Method and path of a curl command."""
    method = re.search(r" -X (\w+)", command)
    path = re.search(rf"http://{ADDRESS}(/[^\s?']*)", command)
    assert path, command
    return method[1] if method else "POST" if re.search(r" -[dF] ", command) else "GET", path[1]


def test_every_route_has_a_curl() -> None:
    found = [block for block in OF_COMMANDS if block.page == "docs/http-api.md"]
    commands = [asked(command) for block in found for command, _ in block.steps()]
    of_v1 = {(method, path.replace("/v/", "/v1/")) for method, path in commands}  # `/v/...` is one more name for each
    missing = [
        f"{method} {rule.rule}"
        for rule in app.url_map.iter_rules()
        for method in sorted((rule.methods or set()) - {"OPTIONS", "HEAD"})
        if rule.rule not in OF_THE_PAGE
        and not any(m == method and covers(rule.rule.replace("/v/", "/v1/"), path) for m, path in of_v1)
    ]
    assert missing == []


def covers(rule: str, path: str) -> bool:
    """Whether a path is one of a rule's."""
    return re.fullmatch(re.sub(r"<(path:)?\w+>", "[^/]+", rule), path) is not None


# --- commands ---------------------------------------------------------------------------------------------


def demonstration() -> str:
    """What the other pages' commands are about; `coder` is of the README's example."""
    text = (REPO / "conf" / "quartermaster.yaml").read_text()
    return quick(text.replace("aliases: [gpt-4o]", "aliases: [gpt-4o, coder]"))


def quick(text: str) -> str:
    """The same models without the waiting."""
    return re.sub(r" --load-time \S+", "", text).replace("--port", "--load-time 0.1 --pace 1000 --port")


def serve(service: Service, text: str) -> None:
    """Put a configuration in force in every worker, with nothing loaded."""
    service.write_config(text)
    wanted = service.post("/api/config/reload").json()["generation"]

    def all_agree() -> bool:
        return all(service.get("/api/config").json()["worker_generation"] >= wanted for _ in range(6))

    eventually(all_agree, "all workers have the page's configuration")
    assert service.get("/unload").status == 200


@pytest.fixture
def place(start_service: StartService, tmp_path: Path, tiny_gguf: Callable[..., Path]) -> Service:
    """The demonstration, served, and a folder with what the pages speak of."""
    service = start_service(demonstration())
    folder = tmp_path / "place"
    (folder / "bin").mkdir(parents=True)
    (folder / "models").mkdir()
    shutil.copy(tiny_gguf("docs"), folder / "models" / "Tiny-Q8_0.gguf")
    shutil.copy(REPO / "conf" / "quartermaster.yaml", folder / "config.yaml")
    program = folder / "bin" / "qmflask"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(REPO)!r})\nfrom qmflask.cli import main\nmain()\n"
    )
    program.chmod(0o755)
    return service


def test_commands_do_what_is_shown(place: Service, tmp_path: Path) -> None:
    """In one service, page by page: each page begins with nothing loaded."""
    folder = tmp_path / "place"
    environ = place.environment() | {"QMFLASK_URL": place.url, "COLUMNS": "80"}
    environ["PATH"] = f"{folder / 'bin'}:{environ['PATH']}"
    ran = 0
    for page in PAGES:
        assert place.get("/unload").status == 200
        for block in BLOCKS:
            if block.page == page and block.language == "yaml" and block.marks.endswith(".yaml"):
                (folder / block.marks).write_text(block.text)
            if block.page == page and block.language == "yaml" and block.marks == "served":
                (folder / "served.yaml").write_text(block.text)
                serve(place, quick(block.text))
            if block.page == page and block.language == "python":
                run([sys.executable, "-c", here(block.text, place)], block, folder, environ)
                ran += 1
            if block.page != page or block not in OF_COMMANDS or block.marks == "not-run":
                continue
            for command, shown in block.steps():
                if command in ELSEWHERE:
                    continue
                words = ["bash", "-c", here(command, place)]
                check(run(words, block, folder, environ), shown, f"{named(block)}: {command}")
                ran += 1
        if any(block.page == page and block.marks == "served" for block in BLOCKS):
            serve(place, demonstration())
    assert ran > 15, "the blocks are not found any more"


def here(text: str, service: Service) -> str:
    """What a page says, with the address of the service that is there for the tests."""
    return text.replace(ADDRESS, f"127.0.0.1:{service.port}")


def run(words: list[str], block: Block, folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, timeout=PATIENCE, text=True)
    told = f"{named(block)}: {words[-1]}\nexit code {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, told
    return done.stdout


def check(output: str, shown: str, where: str) -> None:
    """`...` stands for anything; blanks and empty lines are all the same."""
    wanted = " ".join(shown.split())
    pattern = ".*?".join(re.escape(part.strip()).replace(r"\ ", r"\s+") for part in wanted.split("..."))
    if wanted and not re.fullmatch(r"\s*" + pattern.replace(".*?", r"\s*.*?\s*") + r"\s*", output, re.DOTALL):
        raise AssertionError(f"{where} prints\n{output}\nand not what is shown:\n{shown}")


def test_what_is_compared_can_differ() -> None:
    check("a  b\n\nc\n", "a b\nc\n", "x")
    check("a 1 c\n", "a ... c", "x")
    with pytest.raises(AssertionError, match="not what is shown"):
        check("a 1 d\n", "a ... c\n", "x")


def test_nothing_of_ours_is_forgotten() -> None:
    """Blocks of other kinds are pictures and snippets of other programs' files; commands hide in none of them."""
    for block in BLOCKS:
        assert block.language or not re.search(r"^\s*(\$ |qmflask |make |curl |pip )", block.text, re.MULTILINE), named(
            block
        )
    assert os.path.exists(REPO / "docs" / "design.md")
