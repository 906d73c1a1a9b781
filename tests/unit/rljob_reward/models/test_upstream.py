"""How long a server that refuses wants to be left alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from rljob_reward.models.upstream import parse_retry_after


@pytest.mark.parametrize(("value", "seconds"), [("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("", None), (None, None)])
def test_retry_after_is_seconds(value, seconds):
    assert parse_retry_after(value) == seconds


def test_retry_after_may_be_a_date():
    seconds = parse_retry_after(format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True))
    assert seconds is not None
    assert seconds == pytest.approx(3600, abs=300)


@pytest.mark.parametrize(
    "value", ["inf", "1e400", "nan", "soon", "Mon, 01 Jan 99999 00:00:00 GMT", f"Mon, 01 Jan 2024 00:00:00 +{'9' * 15}"]
)
def test_a_retry_after_that_never_comes_is_none(value):
    assert parse_retry_after(value) is None
