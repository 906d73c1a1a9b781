"""How many executions may start at once."""

from rljob_service.server.pacing import START_WINDOW_SECONDS, may_start, start_limit


def count_starts(mean_seconds, now, started=(), num_processors=2):
    """How many more may start at once, of at most 100; `started` are earlier start times, the newest first."""
    newest_first = list(started)
    for count in range(100):
        if not may_start(newest_first, start_limit(mean_seconds, num_processors), now):
            return count
        newest_first.insert(0, now)
    return 100


def test_short_executions_start_one_per_processor():
    assert count_starts(0.0001, 1.0, num_processors=4) == 4
    assert count_starts(0.0001, 1.0, started=[1.0] * 3, num_processors=4) == 1, "one for each that ended"


def test_executions_older_than_the_window_do_not_count():
    earlier = [1.0] * 2
    assert count_starts(0.0001, 1.0 + START_WINDOW_SECONDS / 2, earlier) == 0
    assert count_starts(0.0001, 1.0 + START_WINDOW_SECONDS, earlier) == 2, "for any mean"


def test_long_executions_all_start_at_once():
    assert count_starts(1.0, 1.0) == 100
