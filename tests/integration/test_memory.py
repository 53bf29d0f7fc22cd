"""Memory decides, end to end: ledgers, a stand-in driver, late releases, games, learned sizes, out of memory."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import StartService
from tests.nvml import FakeCard, build
from tests.service import Service, eventually

GIB = 1024  # MiB
Serve = Callable[..., Service]


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def card(tmp_path: Path, nvml_library: Path) -> Iterator[FakeCard]:
    made = FakeCard(tmp_path, nvml_library, 24 * GIB)
    yield made
    made.close()


class Driver:
    """Decides how much of a model's memory is back after its end, by a file for each model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[Path] = []

    def flags(self, name: str) -> dict[str, Any]:
        """For `serve(flags=...)`: this model's memory stays until it is given back; the others' comes back at once."""
        self._files.append(self._folder / f"back-{name}")
        return {name: {"release_when": str(self._files[-1])}}

    def gives_back(self, name: str, share: float) -> None:
        """That share of the model's memory is back now, if the model has ended."""
        draft = self._folder / "draft"
        draft.write_text(str(share))
        os.replace(draft, self._folder / f"back-{name}")

    def close(self) -> None:
        """Nothing is left behind."""
        for path in self._files:
            path.write_text("1")


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    made = Driver(tmp_path)
    yield made
    made.close()


@pytest.fixture
def serve(start_service: StartService, card: FakeCard) -> Serve:
    """Start a service on the fake card: `serve({"alpha": 6, ...}, budget=16, estimates=False, ...)`, sizes in GiB."""

    def start(sizes: dict[str, float], *, budget: float = 16, estimates: bool = True, **more: Any) -> Service:
        flags = more.pop("flags", {})
        apart = not sizes.keys().isdisjoint(flags)  # flags of single models
        top = more.pop("top", {})

        def config(service: Service) -> dict[str, Any]:
            models = {}
            for name, size in sizes.items():
                own = flags.get(name, {}) if apart else flags
                cmd = service.fake(name, ledger=card.ledger, memory_mb=int(size * GIB), load_time=0.02, **own)
                models[name] = {"cmd": cmd, **({"estVramGB": size} if estimates else {})}
            return {"vramBudgetGB": budget, "models": models, **top}

        return start_service(config, env=card.environment(), **more)

    return start


def stopped_for_nothing(service: Service, name: str) -> bool:
    return bool(service.events("term", name))


def highest_booking(service: Service) -> int:
    """The largest sum ever booked, late releases included, by the servers' own account."""
    booked: dict[int, int] = {}
    highest = 0
    for event in service.events():
        if event["event"] == "booked" and not event["over"]:
            booked[event["pid"]] = event["mb"]
        elif event["event"] == "released":
            booked.pop(event["of"], None)
        highest = max(highest, sum(booked.values()))
    return highest


def test_booked_memory_never_exceeds_the_budget(serve: Serve) -> None:
    sizes = dict(zip("abcdefgh", (2, 3, 4, 5, 6, 7, 3, 2.5), strict=True))
    service = serve(sizes, budget=12, workers=4, flags={"release_delay": 0.06})
    rounds = int(os.environ.get("QM_TEST_ROUNDS", "120"))
    chance = random.Random(3)
    names = [chance.choice(list(sizes)) for _ in range(rounds)]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda name: (name, service.chat(name, timeout=60)), names))
    assert [reply.body for _, reply in replies if reply.status != 200] == []
    assert all(name in reply.text for name, reply in replies)
    assert highest_booking(service) <= 12 * GIB
    assert len(service.events("start")) > 8, "nothing was ever swapped: this proves nothing"


def _not_given_back(reply: Any) -> str:
    """The GiB that a refusal says are missing, after a look at what else it must say."""
    assert (reply.status, reply.code) == (503, "insufficient_memory"), reply.body
    assert reply.header("Retry-After")
    text = str(reply.json()["error"]["message"])
    assert "GiB of VRAM were not given back" in text, text
    return text.partition(" GiB of VRAM")[0].rpartition(" ")[2]


def test_memory_that_is_not_given_back_or_only_in_part(serve: Serve, driver: Driver, card: FakeCard) -> None:
    service = serve({"alpha": 9, "beta": 9}, flags=driver.flags("alpha"), top={"reclaimTimeout": 1})
    card.foreign[os.getpid()] = GIB
    card.write()
    assert service.chat("alpha").status == 200
    reply = service.chat("beta")
    assert _not_given_back(reply) == "9.00"
    assert "after alpha stopped" in reply.body.decode()
    assert f"(pid {os.getpid()}) 1.00 GiB" in reply.body.decode(), "who else holds memory is told"
    driver.gives_back("alpha", 0.5)
    service.wait_event("partly", "alpha")
    assert _not_given_back(service.chat("beta")) == "4.50", "it is still not seen free"
    assert service.events("start", "beta") == []
    driver.gives_back("alpha", 1)
    assert eventually(lambda: service.chat("beta").status == 200, "the driver has given it back")


def test_two_swaps_at_once_of_which_one_gets_its_memory_late_and_in_parts(serve: Serve, driver: Driver) -> None:
    service = serve({"alpha": 8, "beta": 8, "gamma": 8, "delta": 8}, flags=driver.flags("alpha"))
    assert service.chat("alpha").status == service.chat("beta").status == 200
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(service.chat, "gamma")
        service.wait_event("term", "alpha")
        driver.gives_back("alpha", 0.5)
        service.wait_event("partly", "alpha")
        second = pool.submit(service.chat, "delta")
        assert second.result().text == "I am delta.", "beta's memory is back, alpha's is not this swap's business"
        assert not first.done() and not service.events("start", "gamma")
        driver.gives_back("alpha", 1)
        assert first.result().text == "I am gamma."
    assert service.events("start", "gamma")[0]["t"] > service.wait_event("released", "alpha")["t"]
    assert "swap 3: memory was seen free after" in service.log()
    assert highest_booking(service) == 16 * GIB


def test_two_swaps_at_once_of_which_one_never_gets_its_memory(serve: Serve, driver: Driver) -> None:
    sizes = {"alpha": 8, "beta": 8, "gamma": 8, "delta": 8}
    service = serve(sizes, flags=driver.flags("alpha"), top={"reclaimTimeout": 4})
    assert service.chat("alpha").status == service.chat("beta").status == 200
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(service.chat, "gamma")
        service.wait_event("term", "alpha")
        second = pool.submit(service.chat, "delta")
        assert second.result().text == "I am delta."
        assert _not_given_back(first.result()) == "8.00"
    assert [row["model"] for row in service.running()] == ["delta"]
    assert highest_booking(service) == 16 * GIB


def test_a_model_above_the_budget_is_refused_and_nothing_stops(serve: Serve) -> None:
    service = serve({"alpha": 6, "huge": 30}, budget=24)
    assert service.chat("alpha").status == 200
    reply = service.chat("huge")
    assert (reply.status, reply.code) == (503, "insufficient_memory")
    text = reply.body.decode()
    assert "30 GiB" in text and "24 GiB" in text
    assert not reply.header("Retry-After")
    assert not stopped_for_nothing(service, "alpha")


def test_a_game_shrinks_the_budget_and_gives_it_back(serve: Serve, card: FakeCard) -> None:
    service = serve({"alpha": 6, "beta": 12}, budget=24)
    eventually(lambda: service.get("/api/memory").json().get("trusted"), "the floor is known")
    card.foreign[1] = 13 * GIB
    card.write()
    eventually(lambda: service.get("/api/memory").json()["excess"], "the game is seen", timeout=15)
    assert _refused(service.chat("beta"))
    assert service.chat("alpha").status == 200
    card.foreign.clear()
    card.write()
    assert eventually(lambda: service.chat("beta").status == 200, "the budget is whole again", timeout=15)


def _refused(reply: Any) -> bool:
    return reply.status == 503 and reply.code == "insufficient_memory" and bool(reply.header("Retry-After"))


def test_sizes_are_learned_and_kept(serve: Serve) -> None:
    service = serve({"alpha": 5, "beta": 6, "gamma": 9}, budget=16, estimates=False)

    def known(name: str) -> bool:
        sizes = service.get("/api/memory").json().get("sizes", {})
        return bool(sizes.get(name, {}).get("vram", {}).get("origin") == "measured")

    for name in ("alpha", "beta", "gamma"):
        assert service.chat(name).status == 200
        eventually(lambda name=name: known(name), f"the size of {name} is learned", timeout=20)  # type: ignore[misc]
    service.chat("alpha")
    service.chat("beta")
    assert {row["model"] for row in service.running()} == {"alpha", "beta"}
    starts = len(service.events("start"))
    for name in ("alpha", "beta", "alpha", "beta"):
        service.chat(name)
    assert len(service.events("start")) == starts
    plan = service.get("/api/plan?model=gamma").json()
    assert plan["decision"] == "start"
    assert plan["sizes"]["gamma"]["vram"] == {
        "charged": 9 * GIB << 20,
        "origin": "measured",
        "configured": 0,
        "measured": 9 * GIB << 20,
    }


def test_out_of_memory_at_load_evicts_idle_models_and_tries_once_more(serve: Serve) -> None:
    # beta claims 2 GiB but takes 12 beside alpha's 6: its first start dies, the second has the card for itself.
    service = serve(
        {"alpha": 6, "beta": 12},
        budget=16,
        flags={"alpha": {}, "beta": {"ledger_total_mb": 14 * GIB}},
        top={},
        estimates=False,
    )
    config = service.config_path.read_text()
    service.write_config(
        config.replace("  beta:\n", "  beta:\n    estVramGB: 2\n").replace("  alpha:\n", "  alpha:\n    estVramGB: 6\n")
    )
    service.post("/api/config/reload")
    assert service.chat("alpha").status == 200
    reply = service.chat("beta")
    assert reply.status == 200, reply.body
    assert len(service.events("start", "beta")) == 2
    assert [row["model"] for row in service.running()] == ["beta"]


def test_out_of_memory_without_anything_to_evict_is_told_and_not_repeated_at_once(serve: Serve) -> None:
    service = serve({"beta": 12}, flags={"ledger_total_mb": 10 * GIB})
    reply = service.chat("beta")
    assert (reply.status, reply.code) == (503, "insufficient_memory")
    assert "ran out of memory" in reply.body.decode() and "CUDA" in reply.body.decode()
    again = service.chat("beta")
    assert (again.status, again.code) == (503, "insufficient_memory")
    assert int(again.header("Retry-After") or 0) > 20
    assert len(service.events("start", "beta")) == 1


def test_a_hanging_driver_stalls_nobody(serve: Serve, card: FakeCard) -> None:
    service = serve({"alpha": 9, "beta": 9})
    assert service.chat("alpha").status == 200
    card.extra = ["hang nvmlDeviceGetMemoryInfo 20000"]
    card.write()
    began = time.monotonic()
    assert service.chat("beta").status == 200
    assert time.monotonic() - began < 15
    card.extra = []
    card.write()


def test_growth_of_others_unloads_the_largest_idle_model(serve: Serve, card: FakeCard) -> None:
    service = serve({"alpha": 6, "beta": 9}, budget=20, top={"pressureGrace": 1})
    service.chat("alpha")
    service.chat("beta")
    eventually(lambda: service.get("/api/memory").json().get("trusted"), "readings are trusted", timeout=20)
    card.foreign[1] = 7 * GIB
    card.write()
    service.wait_event("term", "beta", timeout=30)
    assert not stopped_for_nothing(service, "alpha")
    stopped = eventually(lambda: service.get("/running?all").json()["stopped"], "why beta is not loaded")
    assert [(row["model"], row["stop"]["reason"]) for row in stopped] == [("beta", "memory pressure")]
    assert b'qmflask_model_stops_total{cause="pressure",model="beta"} 1.0' in service.get("/metrics").body
    assert [row["model"] for row in eventually(lambda: len(service.running()) == 1 and service.running(), "")] == [
        "alpha"
    ]


def test_memory_and_plan_name_who_holds_what(serve: Serve) -> None:
    service = serve({"alpha": 9, "beta": 9})
    service.chat("alpha")
    memory = eventually(
        lambda: (m := service.get("/api/memory").json()).get("models", {}).get("alpha", {}).get("vram") and m,
        "alpha is measured",
        timeout=20,
    )
    assert memory["models"]["alpha"]["vram"] == 9 * GIB << 20
    assert memory["sizes"]["beta"]["vram"]["origin"] == "configured"
    plan = service.get("/api/plan?model=beta").json()
    assert (plan["decision"], plan["victims"]) == ("start", ["alpha"])
    assert service.get("/api/plan?model=nobody").status == 404
    assert service.get("/api/plan").status == 400


def test_the_plan_has_hints_for_models_of_unknown_size(
    start_service: StartService, llama_server: Path, tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    blob = tmp_path / "model.bin"
    blob.write_bytes(b"x" * 5000)
    gguf = tiny_gguf("alpha")
    service = start_service(
        {
            "vramBudgetGB": 8,
            "models": {
                "header": {"cmd": f"{llama_server} -m {gguf} --port ${{PORT}} -c 512 -np 1"},
                "file": {"cmd": f"some-server --model {blob} --port ${{PORT}}"},
            },
        }
    )
    by_header = service.get("/api/plan?model=header").json()["hints"]["header"]
    assert by_header["origin"] == "header"
    assert by_header["vram"] + by_header["ram"] > gguf.stat().st_size
    assert service.get("/api/plan?model=file").json()["hints"] == {"file": {"vram": 5000, "ram": 0, "origin": "file"}}


def test_cpu_models_share_the_ram_budget_and_give_way_to_offloaded_shares(start_service: StartService) -> None:
    def config(service: Service) -> dict[str, Any]:
        sizes = {"cpu1": (0, 5), "cpu2": (0, 5), "gpu": (6, 4)}
        models = {
            name: {"cmd": service.fake(name), "estVramGB": vram, "estRamGB": ram} for name, (vram, ram) in sizes.items()
        }
        groups = {"cpu": {"pool": "ram", "members": ["cpu1", "cpu2"]}}
        return {"vramBudgetGB": 16, "ramBudgetGB": 12, "models": models, "groups": groups, "learnSizes": False}

    service = start_service(config)

    def up() -> set[str]:
        return {row["model"] for row in service.running()}

    for name in ("cpu1", "cpu2"):
        assert service.chat(name).status == 200
    assert up() == {"cpu1", "cpu2"}
    assert service.chat("gpu").status == 200
    assert up() == {"cpu2", "gpu"}, "the GPU model's 4 GiB push the colder CPU model"
    assert service.chat("cpu1").status == 200
    assert up() == {"cpu1", "gpu"}, "a CPU model pushes only its own kind"


def test_learned_sizes_survive_a_restart(serve: Serve) -> None:
    service = serve({"alpha": 5}, estimates=False)
    service.chat("alpha")

    def measured() -> Any:
        return service.get("/api/memory").json().get("sizes", {}).get("alpha", {}).get("vram", {}).get("measured")

    eventually(measured, "the size is learned", timeout=20)
    service.stop()
    service.start()
    assert measured() == 5 * GIB << 20
