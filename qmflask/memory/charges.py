"""What a model is charged: the configured estimate, the learned peak, and how the two are reconciled; pure."""

from __future__ import annotations

from dataclasses import dataclass

from qmflask.memory.samples import GIB, MIB

#: A measurement raises a configured estimate only when it exceeds it by more than this and by more than 2 %.
NOISE = 128 * MIB
NOISE_PERCENT = 2


@dataclass(frozen=True, slots=True)
class Charge:
    """One model's charge in one pool, in bytes, with its origin: "configured", "measured" or "unknown" (0)."""

    size: int
    origin: str
    configured: int = 0
    learned: int = 0

    def warning(self, model: str, key: str) -> str | None:
        """The line that names both figures when a measurement overrules the configuration (`key`: estVramGB ...)."""
        if self.origin != "measured" or not self.configured:
            return None
        return (
            f'model "{model}" was seen using {self.learned / GIB:.2f} GiB, more than its {key} of '
            f"{self.configured / GIB:.2f}; it is charged what was seen"
        )


def charge(configured: int, learned: int) -> Charge:
    """The charge of a configured estimate and a learned peak, both in bytes and 0 when unknown.

    The larger of both; the peak counts beside an estimate only when it is more than noise above it
    (spec/eviction.md, admission 1).
    """
    if configured and learned <= configured + max(NOISE, configured * NOISE_PERCENT // 100):
        return Charge(configured, "configured", configured, learned)
    if learned:
        return Charge(learned, "measured", configured, learned)
    return Charge(0, "unknown")


def learn(peak: int, measured: int | None, answered: bool) -> int:
    """The peak after one measurement; it counts only once the model has answered (some servers load late)."""
    return max(peak, measured) if answered and measured else peak
