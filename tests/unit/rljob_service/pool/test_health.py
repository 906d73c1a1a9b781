"""Which workers are replaced because of their results, as sequences of results."""

from __future__ import annotations

import pytest

from rljob_api.wire.base import InvalidReason
from rljob_service.pool.health import PoolHealth, WorkerHistory, draw_max_requests, has_failed
from rljob_service.results import SampleReply, failure


def start(max_requests: float = float("inf")) -> WorkerHistory:
    return WorkerHistory(max_requests)


def record(pool: PoolHealth, worker: WorkerHistory, results: str) -> list[str]:
    """Record results, + or - each, and return the reasons to replace the worker."""
    return [reason for result in results if (reason := pool.record(worker, failed=result == "-"))]


def test_worker_that_has_succeeded_is_replaced_after_three_failures_in_a_row() -> None:
    pool, worker = PoolHealth(), start()
    assert record(pool, worker, "++++++++++--+++++++++++++++++++++++++++++++--") == []
    assert record(pool, worker, "-") == ["3 failures in a row"]


def test_worker_that_breaks_at_its_start_is_replaced_while_others_succeed() -> None:
    pool, good, broken = PoolHealth(), start(), start()
    reasons = []
    for _ in range(3):
        record(pool, good, "+")
        reasons += record(pool, broken, "-")
        record(pool, good, "+")
    assert reasons == ["3 failures in a row"]


def test_function_that_fails_for_every_sample_costs_no_restart() -> None:
    pool, workers = PoolHealth(), [start() for _ in range(4)]
    assert [reason for worker in workers for reason in record(pool, worker, "-" * 1000)] == []


def test_function_that_stops_working_restarts_each_worker_once() -> None:
    """Such as one whose service is down: new processes cannot help."""
    pool, workers = PoolHealth(), [start() for _ in range(4)]
    for worker in workers:
        record(pool, worker, "+" * 50)
    assert [record(pool, worker, "---") for worker in workers] == [["3 failures in a row"]] * 4
    assert [reason for _ in workers for reason in record(pool, start(), "-" * 1000)] == []


@pytest.mark.parametrize("share", [2, 3, 4])
def test_frequent_failures_are_normal_for_a_function(share: int) -> None:
    """The longest row among 3,000 results that fail at random would replace a worker hundreds of times."""
    pool, worker, num_replaced, state = PoolHealth(), start(), 0, 1
    for _ in range(3000):
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        if pool.record(worker, failed=(state >> 33) % share != 0):
            num_replaced, worker = num_replaced + 1, start()
    assert num_replaced <= 30


def test_unfinished_row_of_a_spoilt_worker_does_not_excuse_it() -> None:
    pool, good, spoilt = PoolHealth(), start(), start()
    record(pool, good, "+" * 20)
    record(pool, spoilt, "+")
    assert record(pool, spoilt, "---") == ["3 failures in a row"]


def test_worker_is_replaced_after_max_requests() -> None:
    assert record(PoolHealth(), start(5), "+++++") == ["it served 5 requests (maxRequests)"]


def test_limits_of_requests_are_spread_below_the_field() -> None:
    limits = {draw_max_requests(1000) for _ in range(200)}
    assert len(limits) > 20
    assert 900 <= min(limits) <= max(limits) <= 1000
    assert draw_max_requests(1) == 1
    assert draw_max_requests(None) == float("inf")


@pytest.mark.parametrize(
    ("reasons", "failed"),
    [
        (["exception"], True),
        (["bad_return", "not_finite"], True),
        (["exception", None], False),
        (["abstained"], False),
        ([None], False),
    ],
)
def test_execution_fails_if_no_sample_has_a_usable_result(reasons: list[str | None], failed: bool) -> None:
    valid = SampleReply(score=1.0, components={}, reason=None, message="")
    replies = [valid if reason is None else failure(InvalidReason(reason), "")[0] for reason in reasons]
    assert has_failed(replies) is failed
