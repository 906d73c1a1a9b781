from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from rljob_api.wire.retry_after import parse_retry_after


@pytest.mark.parametrize(("value", "seconds"), [("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("1e9", 60.0)])
def test_retry_after_is_a_number_of_seconds(value, seconds):
    assert parse_retry_after(value) == seconds


@pytest.mark.parametrize(("offset", "seconds"), [(30, 30.0), (3600, 60.0), (-3600, 0.0)])
def test_retry_after_is_a_date(offset, seconds):
    value = format_datetime(datetime.now(UTC) + timedelta(seconds=offset), usegmt=True)
    assert parse_retry_after(value) == pytest.approx(seconds, abs=2)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "inf",
        "1e400",
        "nan",
        "soon",
        "Mon, 01 Jan 99999 00:00:00 GMT",
        f"Mon, 01 Jan 2024 00:00:00 +{'9' * 15}",
    ],
)
def test_retry_after_is_none_when_missing_or_unusable(value):
    assert parse_retry_after(value) is None
