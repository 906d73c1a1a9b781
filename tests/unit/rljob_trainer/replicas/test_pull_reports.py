"""Whether any rollout gets nearer to the newest weights."""

import pytest

from rljob_api.wire.driver_status import HungPart
from rljob_api.wire.weights import PullReport
from rljob_trainer.replicas.pull_reports import PullReports

SECONDS = 600


def report(progress=0, replica="a", key="g:1", **fields):
    return PullReport(replica=replica, key=key, progress=progress, **fields)


def stalled(reports, now, since=0.0):
    return reports.describe_stalled("g:1", since, SECONDS, now)


def repeat(reports, until, *each):
    """Report the same every 30 s."""
    for now in range(0, until, 30):
        for one in each:
            reports.record(one, now)


def test_replicas_that_fail_again_and_again_are_stalled_with_their_own_reasons():
    reports = PullReports()
    repeat(reports, 661, report(5, error="hash differs"), report(0, "b", error="no space"))
    assert stalled(reports, 599) == ""
    assert stalled(reports, 661) == "a: hash differs; b: no space"
    assert stalled(reports, 661, since=100) == "", "the wait began later"


@pytest.mark.parametrize("fields", [{"progress": 6}, {"is_draining": True}, {"replica": "new"}])
def test_progress_of_one_replica_is_enough(fields):
    reports = PullReports()
    repeat(reports, 631, report(5), report(0, "b", error="no space"))
    reports.record(PullReport(**{"replica": "b", "key": "g:1"} | fields), 620)
    assert stalled(reports, 640) == ""


def test_second_download_is_progress_only_beyond_the_first():
    reports = PullReports()
    repeat(reports, 301, report(5))
    for now, progress in ((310, 0), (340, 3), (370, 5)):
        reports.record(report(progress), now)
    repeat(reports, 631, report(5))
    assert stalled(reports, 631)
    reports.record(report(6), 632)
    assert not stalled(reports, 633)


def test_wait_without_replicas_is_not_a_stall():
    reports = PullReports()
    assert stalled(reports, 10_000) == ""
    reports.record(report(error="no space"), 0)
    assert stalled(reports, 10_000) == "", "the replica no longer exists; the operator starts another"
    reports.record(report(key="g:0", error="no space"), 9_990)
    assert stalled(reports, 10_000) == "", "it has not heard of the new weights yet"


def test_errors_are_described_at_once():
    reports = PullReports()
    reports.record(report(5), 0)
    assert reports.describe_errors("g:1", 1) == ""
    reports.record(report(0, "b", error="no space"), 1)
    assert reports.describe_errors("g:1", 2) == "b: no space"
    assert reports.describe_errors("g:2", 2) == ""


def test_replicas_with_the_same_reason_are_named_together():
    reports = PullReports()
    for i in range(6):
        reports.record(report(0, f"r{i}", error="no space"), 0)
    assert reports.describe_errors("g:1", 1) == "r0, r1, r2, r3 and 2 more: no space"
    for i in range(7):
        reports.record(report(0, f"x{i}", error=f"error {i}"), 0)
    assert reports.describe_errors("g:1", 1).endswith("; x3: error 3 and 3 more")


def test_a_hung_replica_is_listed_until_it_serves_or_has_left():
    reports = PullReports()
    for name in ("a", "b"):
        reports.record_hung(HungPart(role="rollout", name=name, seconds=60, limit_seconds=50), 100.0)
    assert [(part.name, part.seconds) for part in reports.list_hung({"a", "b"}, 105.0)] == [("a", 65), ("b", 65)]
    reports.record_serves("a")
    assert [part.name for part in reports.list_hung({"a", "b"}, 106.0)] == ["b"]
    assert reports.list_hung({"a"}, 107.0) == []
    assert reports.list_hung({"a", "b"}, 108.0) == [], "a new replica with the old address does not hang"


def test_a_hung_engine_of_another_model_is_listed_for_a_while():
    reports = PullReports()
    name = "engine of spec.rewards[0].model at 10.0.0.7:8001"
    reports.record_hung(HungPart(role="trainer", name=name, seconds=60, limit_seconds=50), 100.0)
    assert [part.seconds for part in reports.list_hung({"a"}, 160.0)] == [120]
    assert reports.list_hung({"a"}, 200.0) == []
