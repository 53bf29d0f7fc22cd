"""What is said of a full disk, and how often."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from qmflask.ballast import MIB, TELL_EVERY, Ballast


def test_a_shortage_has_figures_and_is_logged_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_bavail=5 * MIB // 4096, f_frsize=4096))
    ballast = Ballast(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert not ballast.take(), "16 MiB are wanted"
        texts = [ballast.shortage(now) for now in (0.0, 1.0, TELL_EVERY - 1, TELL_EVERY, TELL_EVERY + 1)]
    assert all("5.0 MiB are free, 16 MiB are needed" in text and str(tmp_path) in text for text in texts)
    assert len(caplog.records) == 2
