"""Clients in a storm of kills, stops, reloads and unloads: whole answers or honest errors, nothing twice or left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storm import Storm


@pytest.mark.parametrize("seed", [5])
def test_storm(tmp_path: Path, seed: int) -> None:
    storm = Storm(tmp_path / "storm", seed)
    problems = storm.run(12, every=0.7)
    print(storm.figures())
    print(storm.service.log()[-20_000:])
    assert problems == []
    assert storm.clients.outcomes["whole answers"] > 0 and storm.clients.outcomes["whole streams"] > 0
