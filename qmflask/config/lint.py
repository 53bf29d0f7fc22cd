"""Warnings about what is legal but surely not meant."""

from __future__ import annotations

from collections.abc import Mapping

from qmflask.config.context import Context
from qmflask.config.resolved import Config


def lint(ctx: Context, config: Config, environ: Mapping[str, str]) -> None:
    """Note every warning about `config` in the context's problems."""
