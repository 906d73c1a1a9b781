"""Parse the HTTP header Retry-After (RFC 9110, section 10.2.3)."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


def parse_retry_after(value: str | None) -> float | None:
    """Return the seconds to wait, at least 0; None if the header is missing, malformed or not finite."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value).replace(tzinfo=UTC)  # HTTP dates are always in GMT
        except (ValueError, OverflowError):
            return None
        seconds = (date - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None
