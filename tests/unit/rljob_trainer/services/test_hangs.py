"""Which replicas of a service hang: only those that answer nothing in time."""

from __future__ import annotations

from rljob_trainer.services.hangs import Hangs

LIMIT = 30.0
REPLICAS = ("10.0.0.1", "10.0.0.2")


def time_out(hangs: Hangs, replica: str, sent_at: float) -> None:
    hangs.record_timeout(replica, sent_at, sent_at + LIMIT, "the reward ran longer than 30 s (timeoutSeconds)")


def test_a_replica_that_only_times_out_is_named_until_it_answers() -> None:
    hangs = Hangs("reward-correct", LIMIT, 1)
    time_out(hangs, "10.0.0.1", 100)
    assert hangs.list_hung(REPLICAS, 131) == [], "a sample whose function takes too long is data"
    time_out(hangs, "10.0.0.1", 105)
    [part] = hangs.list_hung(REPLICAS, 140)
    assert (part.role, part.name, part.seconds, part.limit_seconds) == ("reward-correct", "10.0.0.1", 40, LIMIT)
    assert "2 requests in a row timed out" in part.doing
    assert "timeoutSeconds" in part.doing
    assert part.action
    hangs.record_answer("10.0.0.1")
    time_out(hangs, "10.0.0.1", 141)
    assert hangs.list_hung(REPLICAS, 180) == []


def test_timeouts_of_several_replicas_are_not_added_up() -> None:
    hangs = Hangs("agent-run", LIMIT, 1)
    for replica in REPLICAS:
        time_out(hangs, replica, 0)
    assert hangs.list_hung(REPLICAS, 31) == []


def test_a_replica_that_left_or_gets_no_more_requests_is_not_named_forever() -> None:
    for known, now in (((), 36.0), (REPLICAS, 1000.0)):
        hangs = Hangs("reward-correct", LIMIT, 1)
        for sent_at in (0, 5):
            time_out(hangs, "10.0.0.1", sent_at)
        assert len(hangs.list_hung(REPLICAS, 36)) == 1
        assert hangs.list_hung(known, now) == []


def test_long_samples_that_run_at_once_are_data() -> None:
    hangs = Hangs("reward-correct", LIMIT, 4)
    for index in range(4):
        time_out(hangs, "10.0.0.1", index)
    assert hangs.list_hung(REPLICAS, 40) == []
    time_out(hangs, "10.0.0.1", 31)
    assert [part.name for part in hangs.list_hung(REPLICAS, 62)] == ["10.0.0.1"]
