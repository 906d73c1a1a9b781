"""Waiting for conditions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

DEADLINE_SECONDS = 300
"""Only failures take this long. A function that imports torch takes minutes on a busy machine."""


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Poll `condition` and return its first true value."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"waited {DEADLINE_SECONDS:g} s for {what}")
