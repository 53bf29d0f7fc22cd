"""The real NVIDIA binding over a stand-in driver, and AMD's files: several cards, errors, hangs, foreign programs."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qmflask.gpu import Amd, Gpu, Nvml
from qmflask.memory import ceiling as live
from qmflask.memory.ceiling import Ceiling, ModelView
from qmflask.memory.samples import GIB, MIB, Card
from qmflask.proctree import session_members
from qmflask.sampling import Sampler
from qmflask.states import State
from tests.service import eventually

SOURCE = Path(__file__).parents[1] / "parts" / "fake_nvml.c"
Driver = Callable[[str], None]


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in driver, built and loaded; the binding then finds it by its soname."""
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    build = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*build, "-o", str(library), str(SOURCE)], check=True)
    ctypes.CDLL(str(library))
    return library


@pytest.fixture
def driver(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Write what "the driver" reports; it is read anew at each of its calls."""
    state = tmp_path / "nvml.txt"
    monkeypatch.setenv("FAKE_NVML", str(state))

    def write(text: str) -> None:
        draft = state.with_suffix(".new")
        draft.write_text(text)
        draft.rename(state)

    return write


@pytest.fixture
def nvml() -> Iterator[Nvml]:
    source = Nvml()
    yield source
    source.close()


def test_several_cards(driver: Driver, nvml: Nvml) -> None:
    driver(
        "gpu 0 total=24576 used=1024 util=35 memutil=10 uuid=GPU-a name=NVIDIA Fake 24GB\n"
        "gpu 1 total=16384 uuid=GPU-b\n"
        "proc 0 pid=41 used=512\ngproc 0 pid=41 used=512\ngproc 0 pid=42 used=64\n"
        "proc 1 pid=41 used=2048\nproc 1 pid=43 used=-1\n"
    )
    first, second = nvml.read()
    assert first == Card(
        uuid="GPU-a",
        total=24 * GIB,
        used=GIB,
        processes={41: 512 * MIB, 42: 64 * MIB},
        index=0,
        name="NVIDIA Fake 24GB",
        utilisation=35,
        memory_utilisation=10,
        temperature=40,
        power=50,
        fan=None,
    )
    assert (second.uuid, second.index, second.total, second.used) == ("GPU-b", 1, 16 * GIB, 2 * GIB)
    assert second.processes == {41: 2 * GIB, 43: None}


def test_values_change_under_it(driver: Driver, nvml: Nvml) -> None:
    driver("gpu 0 total=24576 used=1024\n")
    assert nvml.read()[0].used == GIB
    driver("gpu 0 total=24576 used=2048\n")
    assert nvml.read()[0].used == 2 * GIB


def test_a_missing_driver_is_one_line(
    driver: Driver, nvml: Nvml, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "qmflask.gpu")
    driver("init_error 9\n")
    monkeypatch.setattr("qmflask.gpu.REOPEN", 0.0)
    assert [nvml.read() for _ in range(3)] == [(), (), ()]
    assert [record.message for record in caplog.records] == ["no NVIDIA cards: Driver Not Loaded"]
    driver("gpu 0 total=24576 used=1024\n")
    assert len(nvml.read()) == 1
    assert caplog.records[-1].message == "NVIDIA cards can be read again"


def test_it_does_not_ask_for_a_missing_driver_all_the_time(driver: Driver, nvml: Nvml) -> None:
    driver("init_error 9\n")
    assert nvml.read() == ()
    driver("gpu 0 total=24576 used=1024\n")
    assert nvml.read() == (), "it is tried again after a minute"


def test_no_library_at_all() -> None:
    """In a process of its own: once loaded, a library stays."""
    script = (
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        "from qmflask.gpu import Gpu, Nvml\n"
        "gpu = Gpu(every=60, sources=[Nvml()]); gpu.start()\n"
        "print(gpu.fresh(5)); gpu.close()\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "cards=()" in run.stdout
    assert run.stderr.count("no NVIDIA cards") == 1


@pytest.mark.parametrize("call", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"])
def test_a_lost_card_is_left_out_with_one_line(
    driver: Driver, nvml: Nvml, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "qmflask.gpu")
    driver(f"gpu 0 total=24576 used=1024\nerror {call} 15\n")
    assert [nvml.read(), nvml.read()] == [(), ()]
    assert [record.message for record in caplog.records] == [
        "NVIDIA card 0 cannot be read and is left out: GPU is lost"
    ]
    driver("gpu 0 total=24576 used=1024\n")
    assert len(nvml.read()) == 1


def test_a_driver_that_breaks_is_opened_anew(driver: Driver, nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmflask.gpu.REOPEN", 0.0)
    driver("gpu 0 total=24576 used=1024\n")
    assert len(nvml.read()) == 1
    driver("gpu 0 total=24576 used=1024\nerror nvmlDeviceGetCount 999\n")
    assert nvml.read() == ()
    driver("gpu 0 total=24576 used=1024\n")
    assert len(nvml.read()) == 1


@pytest.mark.parametrize("call", ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"])
def test_without_a_process_list_the_card_still_counts(driver: Driver, nvml: Nvml, call: str) -> None:
    driver(f"gpu 0 total=24576 used=1024\nproc 0 pid=7 used=1\nerror {call} 3\n")
    assert nvml.read()[0].processes is None


def test_figures_that_a_card_has_not_are_none(driver: Driver, nvml: Nvml) -> None:
    driver("gpu 0 total=24576 used=1\nerror nvmlDeviceGetUtilizationRates 3\nerror nvmlDeviceGetTemperature 3\n")
    card = nvml.read()[0]
    assert (card.utilisation, card.temperature) == (None, None)


def test_a_driver_that_hangs_stalls_nobody(driver: Driver) -> None:
    driver("gpu 0 total=24576 used=1024\n")
    gpu = Gpu(every=60, sources=[Nvml()])
    gpu.start()
    before = gpu.fresh(5)
    assert before is not None and before.used == GIB
    driver("gpu 0 total=24576 used=2048\nhang nvmlDeviceGetMemoryInfo 1200\n")
    began = time.monotonic()
    assert gpu.fresh(0.2) == before, "the last sample, after the time that was given"
    assert time.monotonic() - began < 1
    assert gpu.latest() == before
    # Whoever waits longer than the driver hangs gets the new sample.
    after = gpu.fresh(10)
    assert after is not None and after.used == 2 * GIB
    driver("gpu 0 total=24576 used=2048\n")
    gpu.close()


class Begun(Nvml):
    """Tells when it is asked, so that a test need not guess whether the thread runs already."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def read(self) -> tuple[Card, ...]:
        self.asked.set()
        return super().read()


def test_closing_does_not_wait_for_a_driver_that_hangs(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver("gpu 0 total=24576 used=1024\nhang nvmlDeviceGetMemoryInfo 2500\n")
    source = Begun()
    gpu = Gpu(every=60, sources=[source])
    gpu.start()
    assert source.asked.wait(10)
    began = time.monotonic()
    gpu.close(timeout=0.1)
    assert time.monotonic() - began < 2
    assert "does not answer" in caplog.text
    eventually(lambda: not any(t.name == "qmflask-gpu-nvml" for t in threading.enumerate()), "the call has returned")


def test_one_source_that_hangs_does_not_hold_up_the_other(driver: Driver, tmp_path: Path) -> None:
    amd_card(tmp_path, "card1", total=16 * GIB, used=GIB)
    driver("gpu 0 total=24576 used=1024\nhang nvmlDeviceGetMemoryInfo 1500\n")
    gpu = Gpu(every=60, sources=[Nvml(), Amd(tmp_path)])
    gpu.start()
    found = gpu.fresh(1)
    assert found is not None
    assert [card.name for card in found.cards] == ["AMD GPU"]
    whole = gpu.fresh(10)
    assert whole is not None and len(whole.cards) == 2
    gpu.close(timeout=5)


def test_a_game_that_takes_nine_gb(driver: Driver, nvml: Nvml) -> None:
    """Pinned case of spec/memory.md, from the driver's figures to the ceiling and back."""
    gpu = Gpu(every=60, sources=[nvml])
    state, seen = Ceiling(), []
    driver("gpu 0 total=24576 used=1536\n")  # before the first read: a driver that is missing is not asked again soon
    gpu.start()
    for used in (1536, 1536, 1536, 9728, 1536):
        driver(f"gpu 0 total=24576 used={used}\ngproc 0 pid=1 used={used - 64}\n")
        state = live.step(state, gpu.fresh(5), [], 24 * GIB, GIB)
        seen.append(state.ceiling)
    gpu.close()
    assert seen == [24 * GIB, 24 * GIB, 24 * GIB, 15 * GIB, 24 * GIB]


def test_a_tree_behind_a_shell_wrapper(driver: Driver, nvml: Nvml) -> None:
    wrapper = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
    try:
        members = eventually(
            lambda: pids if len(pids := [one.pid for one in session_members(wrapper.pid)]) == 2 else None,
            "the shell has its child",
        )
        child = next(pid for pid in members if pid != wrapper.pid)
        driver(f"gpu 0 total=24576 used=10240\nproc 0 pid={child} used=8192\n")
        gpu = Gpu(every=60, sources=[nvml])
        gpu.start()
        found = gpu.fresh(5)
        gpu.close()
        tree = ModelView("owl", State.READY, "vram", frozenset(members))
        assert live.read_foreign(found, [tree]).total == 2 * GIB
        assert live.holdings(found, [tree]) == {"owl": 8 * GIB}
        alone = ModelView("owl", State.READY, "vram", frozenset({wrapper.pid}))
        assert not live.read_foreign(found, [alone]).trusted
    finally:
        os.killpg(wrapper.pid, 9)
        wrapper.wait()


def amd_card(root: Path, name: str, **figures: int | str) -> Path:
    device = root / "class" / "drm" / name / "device"
    device.mkdir(parents=True)
    names = {"total": "mem_info_vram_total", "used": "mem_info_vram_used"}
    for key, value in figures.items():
        (device / names.get(key, key)).write_text(f"{value}\n")
    return device


def test_amd_cards(tmp_path: Path) -> None:
    device = amd_card(
        tmp_path, "card10", total=16 * GIB, used=GIB, unique_id="abc123", product_name="Big", gpu_busy_percent=7
    )
    sensors = device / "hwmon" / "hwmon3"
    sensors.mkdir(parents=True)
    for key, value in {
        "temp1_label": "edge",
        "temp1_input": 41000,
        "temp3_label": "mem",
        "temp3_input": 52000,
        "power1_average": 35_000_000,
        "pwm1": 51,
    }.items():
        (sensors / key).write_text(f"{value}\n")
    amd_card(tmp_path, "card2", total=8 * GIB, used=2 * GIB)
    amd_card(tmp_path, "card0", vendor="0x10de")
    amd_card(tmp_path, "card3-DP-1", total=1, used=1)
    second, first = Amd(tmp_path).read()
    assert (first.uuid, first.name, first.total, first.used, first.processes) == ("abc123", "Big", 16 * GIB, GIB, None)
    assert (first.utilisation, first.temperature, first.memory_temperature) == (7, 41, 52)
    assert (first.power, first.fan) == (35, 20)
    assert (second.used, second.name, second.temperature) == (2 * GIB, "AMD GPU", None)


def test_no_amd_cards_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "qmflask.gpu")
    source = Amd(tmp_path)
    assert [source.read(), source.read()] == [(), ()]
    assert len(caplog.records) == 1
    amd_card(tmp_path, "card0", total="garbage", used=1)
    assert source.read() == ()


def test_a_reading_that_raises_is_logged_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[int | Exception] = [ValueError("odd"), ValueError("odd"), 7]

    def read() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    sampler = Sampler("odd", read, every=60)
    assert sampler.latest is None
    sampler.start()
    for _ in range(3):
        sampler.fresh(5)
        if not answers:
            break
    assert sampler.latest == 7
    assert caplog.text.count("sampling failed") == 1
    assert sampler.close()


def test_samples_come_at_intervals() -> None:
    count = threading.Semaphore(0)
    sampler = Sampler("beat", count.release, every=0.01)
    sampler.start()
    for _ in range(3):
        assert count.acquire(timeout=10)
    assert sampler.close()
    assert sampler.close(), "twice does no harm"
