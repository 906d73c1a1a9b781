"""When the loop evaluates, saves and ends."""

import pytest

from rljob_api.manifest.evaluation import Evaluation, list_held_out
from rljob_api.manifest.job_sections import Data
from rljob_api.manifest.schedule import Schedule
from rljob_trainer.driver.between_steps import Cadence
from tests.support.job_simulation import make_job

DATA = Data(train={"source": "/t"}, eval={"source": "/e"})


def cadence_of(steps=10, every=0, checkpoint_every=4, **evaluation):
    held_out = list_held_out(Evaluation(every_steps=every, **evaluation), DATA, [])
    return Cadence(Schedule(steps=steps), held_out, checkpoint_every=checkpoint_every)


def spec_of(every=4, **schedule):
    return make_job(schedule=schedule, checkpoint={"everySteps": every}).spec


def due_steps(is_due, last=10):
    return [step for step in range(last + 1) if is_due(step)]


@pytest.mark.parametrize(
    ("cadence", "expected"),
    [
        (cadence_of(), [0, 10]),
        (cadence_of(every=3), [0, 3, 6, 9, 10]),
        (cadence_of(every=3, at_start=False), [3, 6, 9, 10]),
        (Cadence(Schedule(steps=10), [], checkpoint_every=1), []),
    ],
)
def test_evaluation_is_due_at_the_start_at_intervals_and_at_the_end(cadence, expected):
    assert due_steps(lambda step: cadence.list_due_sets(step, {})) == expected


def test_step_is_evaluated_once():
    assert cadence_of().list_due_sets(10, {"eval": 10}) == []
    assert cadence_of().list_due_sets(10, {"eval": 9}) == ["eval"]


def test_each_set_is_due_at_intervals_of_its_own():
    math = {"name": "math", "data": {"source": "/m"}, "everySteps": 4, "atStart": False}
    cadence = cadence_of(every=2, sets=[math])
    due = {step: cadence.list_due_sets(step, {}) for step in range(11)}
    assert [step for step, names in due.items() if "eval" in names] == [0, 2, 4, 6, 8, 10]
    assert [step for step, names in due.items() if "math" in names] == [4, 8, 10]
    assert cadence.list_due_sets(4, {"eval": 4, "math": 0}) == ["math"], "an evaluation of the other was recorded"


def test_checkpoint_is_due_at_intervals_and_at_the_end_and_never_at_the_start():
    assert due_steps(cadence_of().checkpoint_is_due) == [4, 8, 10]


def test_steps_may_change_at_any_time_and_the_last_one_is_always_due():
    cadence = cadence_of()
    cadence.update(spec_of(steps=7))
    assert cadence.is_over(7)
    assert not cadence.is_over(6)
    assert cadence.checkpoint_is_due(7)
    assert cadence.list_due_sets(7, {"eval": 0})


def test_immutable_fields_stay_as_they_were():
    cadence = cadence_of()
    cadence.update(spec_of(steps=12, type="oneStepOff", seed=3))
    assert (cadence.schedule.steps, cadence.schedule.type, cadence.schedule.seed) == (12, "onPolicy", 0)


def test_changed_interval_of_checkpoints_holds_from_the_next_step_on():
    cadence = cadence_of()
    cadence.update(spec_of(steps=10, every=3))
    assert due_steps(cadence.checkpoint_is_due) == [3, 6, 9, 10]
