"""Who may do what: API keys from Basic, Bearer or x-api-key, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any

from qmflask.config import ApiKey, Config
from qmflask.errors import Unauthorized
from qmflask.headers import offered_key


def accept(config: Config, environ: Mapping[str, Any]) -> ApiKey | None:
    """The configured key that the request carries; None when no keys are configured. Raises Unauthorized."""
    if not config.api_keys:
        return None
    offered = offered_key(environ) or ""
    found = None
    for key in config.api_keys:  # all of them, so that the time tells nothing about which one matched
        if hmac.compare_digest(key.key.encode(), offered.encode("latin-1", "replace")):
            found = key
    if found is None:
        raise Unauthorized(
            "unauthorized: invalid or missing API key; send it as Authorization: Bearer KEY or x-api-key"
        )
    return found
