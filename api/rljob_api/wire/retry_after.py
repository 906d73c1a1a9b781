"""Parse the HTTP header Retry-After (RFC 9110, section 10.2.3)."""

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MAX_RETRY_AFTER_SECONDS = 60.0
"""A server that asks for more is asked again after this time: its clock may be wrong, or its quota raised."""


def parse_retry_after(value: str | None) -> float | None:
    """Return the seconds to wait, from 0 to the maximum; None if the header is missing, malformed or not finite."""
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
    return min(max(0.0, seconds), MAX_RETRY_AFTER_SECONDS) if math.isfinite(seconds) else None
