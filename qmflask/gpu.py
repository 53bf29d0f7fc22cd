"""What the cards tell: NVML in process and AMD through sysfs, each on its own thread, as plain values."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from qmflask.memory.samples import Card, GpuSample
from qmflask.sampling import Sampler

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds until a source that could not be opened is tried again (a driver may be loaded later).
REOPEN = 60.0


class Source(Protocol):
    """One way to ask cards. `read` runs on one thread only and may block."""

    name: str

    def read(self) -> tuple[Card, ...]:
        """All cards of this source now; empty when there is none."""

    def close(self) -> None:
        """Give the driver back."""


class _Notes:
    """Log lines that are said once: again only when what they say has changed."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def say(self, topic: str, line: str) -> None:
        """Log the line unless it was the last of its topic."""
        if self._said.get(topic) != line:
            self._said[topic] = line
            log.info("%s", line)

    def over(self, topic: str, line: str) -> None:
        """Log that a topic's trouble is over, if there was any."""
        if self._said.pop(topic, None) is not None:
            log.info("%s", line)


class Nvml:
    """NVIDIA cards through `pynvml`; opened at the first read, so after fork, and closed by its owner."""

    name = "nvml"

    def __init__(self) -> None:
        self._notes = _Notes()
        self._nvml: Any = None
        self._try_at = 0.0

    def read(self) -> tuple[Card, ...]:
        """Every card whose memory can be read; a card that fails is left out with one log line."""
        if self._nvml is None and not self._open():
            return ()
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            self._notes.say("nvml", f"NVIDIA cards cannot be read: {error}")
            self.close()
            return ()
        cards = [self._card(index) for index in range(count)]
        return tuple(card for card in cards if card is not None)

    def close(self) -> None:
        """Undo the initialisation; the next read begins anew."""
        nvml, self._nvml = self._nvml, None
        if nvml is None:
            return
        self._try_at = time.monotonic() + REOPEN
        try:
            nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            log.debug("NVML did not shut down: %s", error)

    def _open(self) -> bool:
        if time.monotonic() < self._try_at:
            return False
        import pynvml  # here, because only the leader needs it

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._try_at = time.monotonic() + REOPEN
            self._notes.say("nvml", f"no NVIDIA cards: {error}")
            return False
        self._nvml = pynvml
        self._notes.over("nvml", "NVIDIA cards can be read again")
        return True

    def _card(self, index: int) -> Card | None:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError as error:
            self._notes.say(f"card {index}", f"NVIDIA card {index} cannot be read and is left out: {error}")
            return None
        self._notes.over(f"card {index}", f"NVIDIA card {index} can be read again")
        rates = self._optional(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        milliwatts = self._optional(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return Card(
            uuid=uuid,
            total=int(memory.total),
            used=int(memory.used),
            processes=self._processes(index, handle),
            index=index,
            name=_text(self._optional(lambda: nvml.nvmlDeviceGetName(handle)) or ""),
            utilisation=None if rates is None else float(rates.gpu),
            memory_utilisation=None if rates is None else float(rates.memory),
            temperature=_number(
                self._optional(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            power=None if milliwatts is None else milliwatts / 1000,
            fan=_number(self._optional(lambda: nvml.nvmlDeviceGetFanSpeed(handle))),
        )

    def _processes(self, index: int, handle: Any) -> dict[int, int | None] | None:
        """Bytes by pid. A process that computes and draws is in both lists with the same figure: counted once."""
        nvml = self._nvml
        found: dict[int, int | None] = {}
        try:
            for running in (
                nvml.nvmlDeviceGetComputeRunningProcesses(handle),
                nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
            ):
                for process in running:
                    size, before = process.usedGpuMemory, found.get(process.pid)
                    found[process.pid] = before if size is None else max(int(size), before or 0)
        except nvml.NVMLError as error:
            self._notes.say(f"processes {index}", f"NVIDIA card {index} does not list its processes: {error}")
            return None
        self._notes.over(f"processes {index}", f"NVIDIA card {index} lists its processes again")
        return found

    def _optional(self, ask: Callable[[], T]) -> T | None:
        """A figure that not every card and driver has."""
        try:
            return ask()
        except self._nvml.NVMLError:
            return None


class Amd:
    """AMD cards through sysfs; tells no memory of single processes. `root` stands for `/sys` (tests)."""

    name = "amd"

    def __init__(self, root: Path = Path("/sys")) -> None:
        self._drm = root / "class" / "drm"
        self._notes = _Notes()

    def read(self) -> tuple[Card, ...]:
        """Every card that tells its VRAM."""
        found: list[Card] = []
        for device in self._devices():
            total = _file_number(device / "mem_info_vram_total")
            used = _file_number(device / "mem_info_vram_used")
            if total is not None and used is not None:
                found.append(_amd_card(len(found), device, total, used))
        if not found:
            self._notes.say("amd", f"no AMD cards with VRAM figures below {self._drm}")
        return tuple(found)

    def close(self) -> None:
        """Nothing is held open."""

    def _devices(self) -> list[Path]:
        try:
            names = [entry.name for entry in self._drm.iterdir()]
        except OSError:
            return []
        cards = [name for name in names if re.fullmatch(r"card\d+", name)]
        return [self._drm / name / "device" for name in sorted(cards, key=lambda name: int(name[4:]))]


class Gpu:
    """All sources, each with its own thread, merged into one sample. Start it after fork; `close` ends the threads."""

    def __init__(
        self,
        every: float = 5.0,
        sources: Sequence[Source] | None = None,
        notify: Callable[[], None] | None = None,
    ) -> None:
        self._sources: Sequence[Source] = sources if sources is not None else (Nvml(), Amd())
        self._samplers = [Sampler(f"gpu-{source.name}", _stamped(source), every, notify) for source in self._sources]

    def start(self) -> None:
        """Begin to sample."""
        for sampler in self._samplers:
            sampler.start()

    def latest(self) -> GpuSample | None:
        """The newest sample, as old as its oldest part; None before the first. Never blocks."""
        parts = [sampler.latest for sampler in self._samplers]
        taken = [part for part in parts if part is not None]
        if not taken:
            return None
        with_cards = [part for part in taken if part.cards] or taken
        return GpuSample(min(part.at for part in with_cards), tuple(card for part in taken for card in part.cards))

    def ask(self) -> None:
        """Have a new sample taken soon; never blocks."""
        for sampler in self._samplers:
            sampler.ask()

    def fresh(self, timeout: float) -> GpuSample | None:
        """A sample taken from now on; after `timeout` seconds the last one of whatever source has not answered."""
        deadline = time.monotonic() + timeout
        tickets = [(sampler, sampler.ask()) for sampler in self._samplers]
        for sampler, ticket in tickets:
            sampler.wait(ticket, deadline - time.monotonic())
        return self.latest()

    def close(self, timeout: float = 1.0) -> None:
        """End the threads. A source that hangs is left to the end of the process, and its driver is not touched."""
        for source, sampler in zip(self._sources, self._samplers, strict=True):
            if sampler.close(timeout):
                source.close()
            else:
                log.warning("%s does not answer; its thread is left behind", source.name)


def _stamped(source: Source) -> Callable[[], GpuSample]:
    """A read with its time: that of its beginning, since nothing in it is older."""

    def read() -> GpuSample:
        at = time.monotonic_ns()
        return GpuSample(at, source.read())

    return read


def _amd_card(index: int, device: Path, total: int, used: int) -> Card:
    sensors = next(iter(sorted(device.glob("hwmon/hwmon*"))), device / "hwmon")
    power = _file_number(sensors / "power1_average")
    power = _file_number(sensors / "power1_input") if power is None else power
    fan = _file_number(sensors / "pwm1")
    return Card(
        uuid=_file_text(device / "unique_id") or device.resolve().name,
        total=total,
        used=used,
        processes=None,
        index=index,
        name=_file_text(device / "product_name") or "AMD GPU",
        utilisation=_number(_file_number(device / "gpu_busy_percent")),
        memory_utilisation=_number(_file_number(device / "mem_busy_percent")),
        temperature=_scaled(_sensor(sensors, "edge"), 1000),
        memory_temperature=_scaled(_sensor(sensors, "mem"), 1000),
        power=_scaled(power, 1_000_000),
        fan=_scaled(fan, 2.55),
    )


def _sensor(sensors: Path, label: str) -> int | None:
    """The thermometer with this label; the first one stands for the edge where none is labelled."""
    for path in sorted(sensors.glob("temp*_label")):
        if _file_text(path) == label:
            return _file_number(path.with_name(path.name.replace("_label", "_input")))
    return _file_number(sensors / "temp1_input") if label == "edge" else None


def _file_text(path: Path) -> str:
    """What a sysfs file says; empty when it is not there or cannot be read now."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _file_number(path: Path) -> int | None:
    text = _file_text(path)
    return int(text) if text.isdecimal() else None


def _scaled(value: int | None, unit: float) -> float | None:
    return None if value is None else round(value / unit, 3)


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
