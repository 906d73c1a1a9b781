"""Which steps a replay trains on, and from which weights."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rljob_api.errors import UserError
from rljob_cli.replay.plan import ReplayPlan, StepRange, parse_steps, plan_replay

steps = st.sets(st.integers(1, 12), min_size=1)


@pytest.mark.parametrize(("text", "first", "last"), [("40:45", 40, 45), ("3", 3, 3), ("1:1", 1, 1)])
def test_range_has_both_ends(text: str, first: int, last: int) -> None:
    assert parse_steps(text) == StepRange(first, last)


@pytest.mark.parametrize("text", ["", "0:3", "5:4", "a", "1:", "1:2:3", "-1", "1.5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--steps must be A:B"):
        parse_steps(text)


@pytest.mark.parametrize(
    ("recorded", "checkpoints", "requested", "expected"),
    [
        (range(1, 5), [2, 4], None, ReplayPlan(None, (1, 2, 3, 4))),
        (range(1, 7), [2, 4], StepRange(5, 6), ReplayPlan(4, (5, 6))),
        (range(1, 7), [2, 4], StepRange(4, 4), ReplayPlan(2, (3, 4))),
        (range(1, 7), [], StepRange(3, 3), ReplayPlan(None, (1, 2, 3))),
        (range(30, 50), [10, 40], None, ReplayPlan(40, tuple(range(41, 50)))),
        (range(30, 50), [20], StepRange(31, 32), ReplayPlan(20, (31, 32), tuple(range(21, 30)))),
        ([1, 2, 4, 5], [3], None, ReplayPlan(3, (4, 5))),
    ],
)
def test_replay_starts_from_the_nearest_weights(recorded, checkpoints, requested, expected) -> None:  # type: ignore[no-untyped-def]
    assert plan_replay(list(recorded), checkpoints, requested) == expected


def test_plan_says_why_other_steps_are_replayed_too() -> None:
    requested = StepRange(4, 4)
    assert plan_replay(range(1, 7), [2], requested).describe(requested) == (
        "replays steps 3 to 4 from the checkpoint of step 2; step 3 for the weights of step 4: no checkpoint has them"
    )


def test_plan_says_that_weights_differ_if_steps_are_missing() -> None:
    requested = StepRange(31, 31)
    line = plan_replay(range(30, 50), [], requested).describe(requested)
    assert line.startswith("replays step 31 from the initial model; steps 1 to 29 between them: not in the log")


def test_step_outside_the_log_is_refused() -> None:
    with pytest.raises(UserError, match=r"--steps 5:9: steps 7 to 9 not in the log, which has steps 1 to 6"):
        plan_replay(range(1, 7), [], StepRange(5, 9))


def test_cut_log_without_a_checkpoint_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"trajectoriesSize has deleted older files; --steps 30:49 trains the initial"):
        plan_replay(range(30, 50), [10, 49], None)


@given(steps, st.sets(st.integers(1, 12)), st.integers(1, 12), st.integers(0, 3))
def test_steps_ascend_are_recorded_and_follow_the_start(
    recorded: set[int], checkpoints: set[int], first: int, length: int
) -> None:
    requested = StepRange(first, first + length)
    wanted = list(range(first, first + length + 1))
    assume(set(wanted) <= recorded)
    plan = plan_replay(recorded, checkpoints, requested)
    start = plan.checkpoint or 0
    assert plan.checkpoint is None or plan.checkpoint in checkpoints
    assert set(plan.steps) <= recorded
    assert list(plan.steps)[-len(wanted) :] == wanted
    if plan.missing:
        assert list(plan.steps) == wanted
        assert not set(plan.missing) & recorded
    else:
        assert list(plan.steps) == list(range(start + 1, wanted[-1] + 1)), "each step from the start's weights"


@given(steps, st.sets(st.integers(1, 12)))
def test_without_a_range_each_step_starts_from_the_weights_of_the_run(
    recorded: set[int], checkpoints: set[int]
) -> None:
    try:
        plan = plan_replay(recorded, checkpoints, None)
    except UserError:
        return
    assert plan.steps == tuple(range((plan.checkpoint or 0) + 1, max(recorded) + 1))
    assert set(plan.steps) <= recorded
