"""Whether a start died for lack of memory, from the lines of its log; and when it may be tried again. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

SECOND = 1_000_000_000
#: How long a start that died for lack of memory is not tried again.
PAUSE = 30 * SECOND
#: Per cent by which free memory must rise to try earlier.
RISE = 5

#: What to look for -> (who ran out, pool). The first that matches decides, so the exact ones come first.
_SIGNS: tuple[tuple[re.Pattern[str], str, str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), who, pool)
    for pattern, who, pool in (
        (r"cudaMalloc failed: out of memory|CUDA error: out of memory|CUDA out of memory", "CUDA", "vram"),
        (r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED", "CUDA", "vram"),
        (r"allocating [\d.]+ MiB on device \S+ (cudaMalloc|hipMalloc) failed", "CUDA", "vram"),
        (r"No available memory for the cache blocks|Free memory on device .* is less than desired", "CUDA", "vram"),
        (r"hipErrorOutOfMemory|HIP (error: )?out of memory|hipMalloc failed|ROCm.*out of memory", "ROCm", "vram"),
        (r"ErrorOutOfDeviceMemory|VK_ERROR_OUT_OF_DEVICE_MEMORY", "Vulkan", "vram"),
        (
            r"ggml_vulkan: .*(failed to allocate|allocation of size .* failed|device memory allocation)",
            "Vulkan",
            "vram",
        ),
        (r"ErrorOutOfHostMemory|VK_ERROR_OUT_OF_HOST_MEMORY", "Vulkan", "ram"),
        (r"kIOGPUCommandBufferCallbackErrorOutOfMemory", "Metal", "vram"),
        (
            r"(ggml_metal|ggml_backend_metal|MTL).*(failed to allocate|out of memory|insufficient memory)",
            "Metal",
            "vram",
        ),
        (r"std::bad_alloc|MemoryError\b|Cannot allocate memory|ENOMEM", "std::bad_alloc", "ram"),
        (r"failed to allocate (CPU|CPU_\w+|host) buffer|DefaultCPUAllocator: (can't|not enough)", "allocator", "ram"),
        (r"Out of memory: Killed process|oom-kill:|invoked oom-killer|Memory cgroup out of memory", "kernel", "ram"),
        (r"ggml_gallocr_reserve_n(_impl)?: failed to allocate (?!CPU)\S+ buffer", "device", "vram"),
        (r"\bout of (device |GPU )memory\b|torch\.OutOfMemoryError", "device", "vram"),
    )
)


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """What a log says: who ran out, in which pool, and the line itself."""

    who: str
    pool: str
    line: str


def find(lines: Iterable[str]) -> OutOfMemory | None:
    """The first line that says a start ran out of memory, or None."""
    for line in lines:
        for sign, who, pool in _SIGNS:
            if sign.search(line):
                return OutOfMemory(who, pool, line.strip())
    return None


def diagnose(lines: Iterable[str], exit_code: int | None, killed_by_us: bool, oom_kills: int = 0) -> OutOfMemory | None:
    """As `find`, and the kernel's own kill, which leaves no line: SIGKILL (-9 or 137) that was not ours.

    `oom_kills` is by how much the kernel's counter rose meanwhile, where it can be read.
    """
    found = find(lines)
    if found is None and not killed_by_us and oom_kills > 0 and exit_code in (-9, 137):
        return OutOfMemory("kernel", "ram", "the kernel killed it for lack of memory")
    return found


def may_retry(failed_at: int, free_then: int | None, now: int, free_now: int | None) -> bool:
    """Whether a start that ran out of memory may be tried again: after 30 s, or when free memory rose by 5 %."""
    if now - failed_at >= PAUSE:
        return True
    if free_then is None or free_now is None:
        return False
    return free_now > free_then and free_now * 100 >= free_then * (100 + RISE)
