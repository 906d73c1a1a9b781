"""Outages: their time counts once, a success ends them, and only a long one ends the job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.errors import UserError
from rljob_trainer.outages import OutageError, Outages

LIMIT = 100.0
OPENS_AFTER = 10.0


class World:
    def __init__(self, *names, limit=LIMIT, answered=True):
        self.time = 0.0
        self.outages = Outages(limit, lambda: self.time, lambda: 1_000_000.0 + self.time)
        self.parts = [self.outages.watch(name, "start it") for name in names]
        for part in self.parts if answered else []:
            part.succeeded()


def test_failure_is_an_outage_once_it_lasts_and_a_success_ends_it():
    world = World("spec.rewards[0].http (http://r)")
    [part] = world.parts
    part.failed("refused")
    assert not world.outages.is_open()
    world.time = OPENS_AFTER
    assert world.outages.is_open()
    assert world.outages.describe() == "waits for spec.rewards[0].http (http://r), away for 10 s: refused"
    [report] = world.outages.report()
    assert (report.what, report.seconds, report.limit_seconds, report.message) == (part.what, 10.0, LIMIT, "refused")
    part.succeeded()
    assert not world.outages.is_open()
    assert (world.outages.describe(), world.outages.seconds()) == ("", 10.0)


def test_what_never_answered_is_no_outage_and_still_ends_the_job():
    world = World("spec.hub (https://hub)", answered=False)
    world.parts[0].failed("no route")
    world.time = LIMIT
    assert not world.outages.is_open()
    with pytest.raises(OutageError):
        world.parts[0].check()


def test_an_endpoint_that_never_answered_is_not_waited_for_as_long_as_one_that_did():
    world = World(limit=LIMIT)
    part = world.outages.watch("spec.rewards[0].http (http://jugde)", "correct it", first_answer_seconds=LIMIT / 2)
    part.failed("Name or service not known")
    world.time = LIMIT / 2 - 1
    part.check()
    world.time += 1
    with pytest.raises(
        OutageError, match=r"jugde\): has not answered once in 50 s; last error: Name .* known; correct it"
    ):
        part.check()
    part.succeeded()
    part.failed("refused")
    world.time += LIMIT / 2
    part.check()


def test_end_names_the_field_the_time_the_error_and_the_remedy():
    world = World("spec.rewards[0].http (http://r)")
    [part] = world.parts
    world.time = 5.0
    part.failed("first")
    world.time = 5.0 + LIMIT - 1
    part.failed("503 gone")
    part.check()
    world.time += 1
    with pytest.raises(UserError) as raised:
        part.check()
    assert str(raised.value) == (
        "spec.rewards[0].http (http://r): away since 1970-01-12T13:46:45Z, for longer than spec.outageSeconds (100 s); "
        "last error: 503 gone; start it, or raise spec.outageSeconds; the job resumes from its last checkpoint"
    )


def test_what_answered_before_a_restart_is_known_by_its_address():
    before = World("spec.rewards[0].http (http://r)", "spec.rewards[1].http (http://s)")
    after = World("spec.rewards[0].http (http://r)", "spec.rewards[1].http (http://new)", answered=False)
    after.outages.recall(before.outages.answered())
    later = after.outages.watch("spec.rewards[1].http (http://s)")
    assert [part.has_answered for part in (*after.parts, later)] == [True, False, True]


def test_short_limits_are_seen_before_they_pass():
    world = World("r", limit=2.0)
    world.parts[0].failed("x")
    world.time = 1.0
    assert world.outages.is_open()


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["failed", "succeeded", "clear"]), st.integers(0, 25)), max_size=40
)


@given(EVENTS)
def test_time_of_overlapping_outages_counts_once(events):
    """Second by second: anything that fails for 10 s or more was away from its first failure on."""
    world = World("a", "b", "c")
    spans, failing, total_before = [], {}, 0.0
    for index, event, wait in events:
        if event == "failed":
            world.parts[index].failed("x")
            failing.setdefault(index, world.time)
        else:
            getattr(world.parts[index], event)()
            if (start := failing.pop(index, None)) is not None:
                spans.append((start, world.time))
        world.time += wait
        now_failing = [(start, world.time) for start in failing.values()]
        long = [(start, end) for start, end in [*spans, *now_failing] if end - start >= OPENS_AFTER]
        away = {second for start, end in long for second in range(int(start), int(end))}
        assert world.outages.seconds() == len(away)
        assert world.outages.seconds() >= total_before, "it never shrinks"
        total_before = world.outages.seconds()
        assert world.outages.is_open() == any(end - start >= OPENS_AFTER for start, end in now_failing)
    for index, part in enumerate(world.parts):
        assert part.failing_since == failing.get(index)
        assert part.away_seconds >= part.failing_seconds


def test_what_depends_on_something_away_is_excused_until_it_is_back():
    world = World("rollouts")
    [part] = world.parts
    part.failed("blip")
    assert part.was_away(0.0)
    part.succeeded()
    assert not part.was_away(0.0), "a blip that is over excuses nothing"
    part.failed("gone")
    world.time = 50.0
    part.succeeded()
    assert part.was_away(49.0)
    assert not part.was_away(50.0)
