"""Parts that models and peers share, from section to resolved value: filters and timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qmflask.config.resolved import Filters, Timeouts
from qmflask.config.schema import FiltersSection, ModelFiltersSection, TimeoutsSection


def filters(section: FiltersSection) -> Filters:
    """Effective filters: `model` and what lies under it are never touched."""
    strip = section.strip_params
    if isinstance(section, ModelFiltersSection) and not strip.strip():
        strip = section.old_strip_params
    names = {name.strip() for name in strip.split(",")} - {""}
    return Filters(
        strip_params=tuple(sorted(name for name in names if not protects_model(name))),
        set_params=_settable(section.set_params),
        set_params_by_id={name: _settable(params or {}) for name, params in section.set_params_by_id.items()},
    )


def protects_model(name: str) -> bool:
    """Whether a filter's key is `model` or a path under it, which would destroy the request's model."""
    return name == "model" or name.startswith("model.")


def _settable(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in sorted(params) if not protects_model(name)}


def timeouts(section: TimeoutsSection) -> Timeouts:
    """Effective upstream timeouts."""
    return Timeouts(
        connect=section.connect,
        keepalive=section.keepalive,
        response_header=section.response_header,
        tls_handshake=section.tls_handshake,
        expect_continue=section.expect_continue,
        idle_conn=section.idle_conn,
    )
