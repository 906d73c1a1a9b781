from __future__ import annotations

from datetime import UTC, datetime

import pytest

from rljob_api.wire.retry_after import parse_retry_after

NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("-1", 0.0),
        ("Sat, 21 Nov 2026 11:00:00 GMT", 3600.0),
        ("Sat, 21 Nov 2026 11:00:00 -0000", 3600.0),
        ("Sat, 21 Nov 2026 09:00:00 GMT", 0.0),
    ],
)
def test_retry_after_is_a_number_of_seconds_or_a_date(value, seconds):
    assert parse_retry_after(value, NOW) == seconds


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
    assert parse_retry_after(value, NOW) is None


def test_retry_after_date_is_relative_to_the_system_clock_by_default():
    assert parse_retry_after("Fri, 31 Dec 9999 23:59:59 GMT") > 1e9
