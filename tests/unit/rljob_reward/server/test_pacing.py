"""How many executions may begin at once."""

from rljob_reward.server.pacing import START_WINDOW_SECONDS, Pacing


def count_begun(pacing, mean_seconds, now, names=range(100)):
    """How many more may begin at once, of 100."""
    for count, name in enumerate(names):
        if not pacing.has_room(mean_seconds, now):
            return count
        pacing.begin((now, name), now)
    return len(names)


def test_short_executions_take_two_workers_a_processor():
    pacing = Pacing(num_processors=2)
    assert count_begun(pacing, 0.0001, 1.0, "abcdefgh") == 4
    pacing.end((1.0, "b"))
    assert count_begun(pacing, 0.0001, 1.0) == 1, "one for each that ends"


def test_executions_that_last_hold_nothing_back():
    pacing = Pacing(num_processors=2)
    count_begun(pacing, 0.0001, 1.0)
    assert count_begun(pacing, 0.0001, 1.0 + START_WINDOW_SECONDS) == 4, "whatever the mean of the others says"


def test_long_executions_begin_all_at_once():
    assert count_begun(Pacing(num_processors=2), 1.0, 1.0) == 100


def test_an_execution_may_end_that_is_not_counted_any_more():
    pacing = Pacing(num_processors=1)
    pacing.begin("a", 1.0)
    assert pacing.has_room(0.0, 2.0)
    pacing.end("a")
    assert count_begun(pacing, 0.0, 2.0) == 2
