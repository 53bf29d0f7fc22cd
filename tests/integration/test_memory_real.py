"""What the product measures of real llama-servers, beside the kernel's own account of their processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import StartService
from tests.service import Service, eventually, llama

MIB = 1 << 20
#: What the issue asks for.
ALLOWED = 0.1
#: About 220 tokens, so that prompt and compute buffers are used.
PROMPT = "All work and no play makes a model dull. " * 5

MakeModel = Callable[..., Path]
Case = tuple[str, int, str]
#: name -> (preset, context, further options)
QUICK: dict[str, Case] = {
    "5m": ("5m", 2048, ""),
    "50m": ("50m", 2048, ""),
    "50m-no-repack": ("50m", 2048, "--no-repack"),
}
LARGE: dict[str, Case] = {
    "200m": ("200m", 4096, ""),
    "400m": ("400m", 512, ""),
    "400m-4096": ("400m", 4096, ""),
    "400m-32768": ("400m", 32768, ""),
    "400m-no-repack": ("400m", 4096, "--no-repack"),
    "400m-not-mapped": ("400m", 4096, "--load-mode none"),
    "400m-q8-cache": ("400m", 4096, "-ctk q8_0 -ctv q8_0"),
}


def held_by(pids: list[int]) -> int:
    """RssAnon and the proportional share of file-backed pages, as the kernel tells them; bytes."""
    return sum(
        _field(Path(f"/proc/{pid}/status"), "RssAnon") + _field(Path(f"/proc/{pid}/smaps_rollup"), "Pss_File")
        for pid in pids
    )


def _field(path: Path, name: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def measure(service: Service, name: str, case: Case) -> tuple[int, int, int]:
    """(the kernel's figure, the product's of now, the product's peak) of a model that has answered; bytes.

    Prints the row for docs/memory.md.
    """

    def learned() -> Any:
        size = service.get("/api/memory").json().get("sizes", {}).get(name, {}).get("ram", {})
        return size.get("origin") == "measured" and size["measured"]

    assert service.chat(name, PROMPT, max_tokens=8, timeout=100).status == 200
    eventually(learned, f"the size of {name} is learned")
    pid = next(row["pid"] for row in service.running() if row["model"] == name)
    now = service.get("/api/memory").json()["models"][name]
    assert pid in now["pids"]
    found = held_by(now["pids"]), now["ram"], learned()
    rss = sum(_field(Path(f"/proc/{pid}/status"), "VmRSS") for pid in now["pids"])
    figures = " | ".join(f"{size / MIB:.0f}" for size in (rss, *found))
    print(f"| {case[0]} | {case[1]} | {f'`{case[2]}`' if case[2] else ''} | {figures} |")
    return found


def serve(start_service: StartService, server: Path, model: MakeModel, cases: Mapping[str, Case]) -> Service:
    models = {
        name: {"cmd": llama(server, model(f"real-{preset}", "", "--preset", preset), context=context, extra=extra)}
        for name, (preset, context, extra) in cases.items()
    }
    return start_service(
        {"ramBudgetGB": 16, "models": models, "groups": {"cpu": {"pool": "ram", "swap": False, "members": list(cases)}}}
    )


def near(figure: int, truth: int) -> bool:
    return abs(figure - truth) <= ALLOWED * truth


def test_servers_side_by_side(start_service: StartService, llama_server: Path, tiny_gguf: MakeModel) -> None:
    """Two of them map the same file, and all the same libraries: each has its share."""
    service = serve(start_service, llama_server, tiny_gguf, QUICK)
    for name in QUICK:
        truth, _, peak = measure(service, name, QUICK[name])
        assert near(peak, truth), name
    plan = service.get("/api/plan?model=50m").json()
    assert plan["sizes"]["50m"]["ram"]["origin"] == "measured"
    assert {row["model"] for row in service.running()} == set(QUICK), "they fit together"

    def all_near() -> bool:
        """The newest sample; shares fall when a server joins, what was learned does not."""
        seen = service.get("/api/memory").json()["models"]
        return all(near(seen[name]["ram"], held_by(seen[name]["pids"])) for name in QUICK)

    eventually(all_near, "each is measured with its share")


@pytest.mark.heavy
@pytest.mark.parametrize("name", LARGE)
def test_large_servers(start_service: StartService, llama_server: Path, tiny_gguf: MakeModel, name: str) -> None:
    service = serve(start_service, llama_server, tiny_gguf, {name: LARGE[name]})
    truth, now, peak = measure(service, name, LARGE[name])
    assert near(now, truth) and near(peak, truth)
