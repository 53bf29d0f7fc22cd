"""Charges, the watchdog and out-of-memory lines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmflask.memory import oom
from qmflask.memory.charges import Charge, charge, learn
from qmflask.memory.samples import GIB, MIB, TreeMemory
from qmflask.memory.watchdog import QUIET, ResidentView, Watch, watch

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("configured", "learned", "size", "origin"),
    [
        (0, 0, 0, "unknown"),
        (8 * GIB, 0, 8 * GIB, "configured"),
        (0, 5 * GIB, 5 * GIB, "measured"),
        (8 * GIB, 7 * GIB, 8 * GIB, "configured"),
        (8 * GIB, 9 * GIB, 9 * GIB, "measured"),
        (GIB, GIB + 128 * MIB, GIB, "configured"),
        (GIB, GIB + 128 * MIB + 1, GIB + 128 * MIB + 1, "measured"),
        (100 * GIB, 102 * GIB, 100 * GIB, "configured"),
        (100 * GIB, 102 * GIB + 1, 102 * GIB + 1, "measured"),
    ],
)
def test_charge(configured: int, learned: int, size: int, origin: str) -> None:
    found = charge(configured, learned)
    assert (found.size, found.origin) == (size, origin)


def test_the_warning_names_both_figures() -> None:
    line = charge(8 * GIB, 9 * GIB).warning("owl", "estVramGB")
    assert line is not None
    assert '"owl"' in line and "9.00" in line and "estVramGB of 8.00" in line
    assert charge(8 * GIB, 8 * GIB).warning("owl", "estVramGB") is None
    assert charge(0, 8 * GIB).warning("owl", "estVramGB") is None
    assert Charge(0, "unknown").warning("owl", "estVramGB") is None


def test_learning_begins_with_the_first_answer() -> None:
    assert learn(0, 5, answered=False) == 0
    assert learn(0, 5, answered=True) == 5
    assert learn(7, 5, answered=True) == 7
    assert learn(7, None, answered=True) == 7


def test_a_tree_is_charged_its_share_and_gives_back_less() -> None:
    tree = TreeMemory(600 * MIB, 450 * MIB, 10 * MIB, 5 * MIB) + TreeMemory(1 * MIB)
    assert tree.held == 1066 * MIB
    assert tree.returns == 611 * MIB


def residents(**sizes: int) -> list[ResidentView]:
    return [ResidentView(name.lower(), size * GIB, name.islower()) for name, size in sizes.items()]


def test_watchdog_waits_for_the_grace_period_then_takes_the_largest() -> None:
    loaded = residents(owl=9, fox=7, elk=4)
    state, shed = watch(Watch(), loaded, 24 * GIB, 8 * GIB, 30 * SECOND, 100)
    assert shed is None
    state, shed = watch(state, loaded, 24 * GIB, 8 * GIB, 30 * SECOND, 99 + 30 * SECOND)
    assert shed is None
    state, shed = watch(state, loaded, 24 * GIB, 8 * GIB, 30 * SECOND, 100 + 30 * SECOND)
    assert shed is not None
    assert shed.models == ("owl",)
    assert (shed.resident, shed.line) == (20 * GIB, 16 * GIB + GIB // 2)
    assert state.quiet_until == 100 + 30 * SECOND + QUIET


def test_watchdog_starts_over_when_it_fits_again() -> None:
    loaded = residents(owl=9, fox=8)
    state, _ = watch(Watch(), loaded, 24 * GIB, 8 * GIB, 30 * SECOND, 0)
    state, _ = watch(state, loaded, 24 * GIB, 7 * GIB + GIB // 2, 30 * SECOND, 10 * SECOND)
    assert state.over_since is None
    state, shed = watch(state, loaded, 24 * GIB, 8 * GIB, 30 * SECOND, 31 * SECOND)
    assert shed is None


def test_watchdog_has_half_a_gib_of_slack_and_no_reserve() -> None:
    assert watch(Watch(0), residents(owl=16), 24 * GIB, 8 * GIB, 0, 1)[1] is None
    assert watch(Watch(0), [ResidentView("owl", 16 * GIB + GIB // 2 + 1, True)], 24 * GIB, 8 * GIB, 0, 1)[1] is not None


def test_watchdog_never_takes_who_is_busy() -> None:
    state, shed = watch(Watch(0), residents(OWL=9, fox=7, elk=4), 24 * GIB, 8 * GIB, 30 * SECOND, 40 * SECOND)
    assert shed is not None
    assert shed.models == ("fox",)
    state, shed = watch(Watch(0), residents(OWL=20), 24 * GIB, 8 * GIB, 30 * SECOND, 40 * SECOND)
    assert shed is None
    assert state == Watch(0), "it tries again as soon as one is free to go"


def test_watchdog_is_quiet_after_it_took_somebody() -> None:
    state, shed = watch(Watch(0), residents(owl=20, fox=9), 24 * GIB, 20 * GIB, 45 * SECOND, 50 * SECOND)
    assert shed is not None
    assert state.quiet_until == 140 * SECOND, "twice the grace period is longer than a minute here"
    for now in (50, 100, 139):
        state, shed = watch(state, residents(fox=9), 24 * GIB, 20 * GIB, 45 * SECOND, now * SECOND)
        assert shed is None
    assert watch(state, residents(fox=9), 24 * GIB, 20 * GIB, 45 * SECOND, 140 * SECOND)[1] is not None


def test_watchdog_trims_what_learned_sizes_have_raised() -> None:
    shed = watch(Watch(0), residents(owl=14, fox=12), 24 * GIB, 0, 30 * SECOND, 40 * SECOND)[1]
    assert shed is not None
    assert shed.models == ("owl",)


def test_watchdog_without_a_budget_sleeps() -> None:
    assert watch(Watch(0), residents(owl=99), 0, 0, 0, 1) == (Watch(None), None)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=8), st.integers(1, 24), st.integers(0, 24))
def test_watchdog_takes_no_more_than_it_must(loaded: list[tuple[int, bool]], budget: int, excess: int) -> None:
    views = [ResidentView(f"m{n}", size * GIB, free) for n, (size, free) in enumerate(loaded)]
    _, shed = watch(Watch(0), views, budget * GIB, excess * GIB, 0, 1)
    if shed is None:
        return
    gone = [view for view in views if view.model in shed.models]
    assert all(view.free_to_go for view in gone)
    left = shed.resident - sum(view.charge for view in gone)
    stay = [view for view in views if view.free_to_go and view.charge and view not in gone]
    assert left <= shed.line or not stay
    smallest = min(gone, key=lambda view: view.charge)
    assert left + smallest.charge > shed.line


@pytest.mark.parametrize(
    ("line", "who", "pool"),
    [
        ("alloc_buffer: allocating 9216.00 MiB on device 0: cudaMalloc failed: out of memory",
         "CUDA", "vram"),
        ("CUDA error: out of memory", "CUDA", "vram"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...", "CUDA", "vram"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUDA", "vram"),
        ("ValueError: No available memory for the cache blocks.", "CUDA", "vram"),
        ("hipErrorOutOfMemory: out of memory", "ROCm", "vram"),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 GiB", "ROCm", "vram"),
        ("ggml_vulkan: Device memory allocation of size 1073741824 failed.", "Vulkan", "vram"),
        ("vk::Device::allocateMemory: ErrorOutOfDeviceMemory", "Vulkan", "vram"),
        ("ggml_metal_add_buffer: error: failed to allocate buffer, size = 4096.00 MiB", "Metal", "vram"),
        ("status 5: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", "Metal", "vram"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "std::bad_alloc", "ram"),
        ("OSError: [Errno 12] Cannot allocate memory", "std::bad_alloc", "ram"),
        ("Out of memory: Killed process 4242 (llama-server) total-vm:9000000kB", "kernel", "ram"),
        ("Memory cgroup out of memory: Killed process 7 (python)", "kernel", "ram"),
        ("llama_kv_cache: failed to allocate CPU buffer of size 1099511627776", "allocator", "ram"),
    ],
)  # fmt: skip
def test_out_of_memory_lines(line: str, who: str, pool: str) -> None:
    found = oom.find(["load_model: loading", line, "main: exiting"])
    assert found is not None
    assert (found.who, found.pool, found.line) == (who, pool, line)


@pytest.mark.parametrize(
    "line",
    [
        "load_tensors: offloading 33 repeating layers to GPU",
        "error: failed to load model '/models/x.gguf': no such file",
        "llama_context: CUDA0 compute buffer size = 300.00 MiB",
        "W memory pressure is low, 12.4 GiB free",
        "couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 5800",
        "flash attention needs memory proportional to the context",
    ],
)
def test_other_lines(line: str) -> None:
    assert oom.find([line]) is None


def test_a_kill_by_the_kernel_leaves_no_line() -> None:
    assert oom.diagnose(["loading"], -9, killed_by_us=False, oom_kills=1) is not None
    assert oom.diagnose(["loading"], 137, killed_by_us=False, oom_kills=1) is not None
    assert oom.diagnose(["loading"], -9, killed_by_us=False) is None
    assert oom.diagnose(["loading"], -9, killed_by_us=True, oom_kills=1) is None
    assert oom.diagnose(["loading"], 1, killed_by_us=False, oom_kills=1) is None
    assert oom.diagnose(["std::bad_alloc"], 134, killed_by_us=False) is not None


def test_when_to_try_again() -> None:
    assert not oom.may_retry(0, 100, 29 * SECOND, 104)
    assert oom.may_retry(0, 100, 1, 105)
    assert oom.may_retry(0, 100, 30 * SECOND, 0)
    assert not oom.may_retry(0, None, 1, 105)
    assert not oom.may_retry(0, 0, 1, 0)
    assert oom.may_retry(0, 0, 1, 1)
