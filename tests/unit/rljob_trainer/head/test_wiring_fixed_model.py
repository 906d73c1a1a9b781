"""A job that only evaluates: the real driver, without a trainer."""

import pytest

from rljob_api.wire.weights import OWN_WEIGHTS
from rljob_trainer.head.wiring import as_evaluation, read_figures, start_fixed
from tests.support.driver_harness import make_job


@pytest.fixture
def evaluating(make_harness):
    """Return a harness as the head wires a job with task evaluate."""

    def make(**spec):
        harness = make_harness(task="evaluate", **spec)
        harness.job = as_evaluation(harness.job)
        harness.start_trainer, harness.published = start_fixed, OWN_WEIGHTS
        return harness

    return make


async def test_each_held_out_prompt_is_scored_once_and_nothing_is_trained(evaluating):
    async with evaluating(evaluation={"atStart": False, "everySteps": 5}) as harness:
        harness.read_steps = lambda: None
        await harness.run()
    [found] = harness.metrics().evaluations
    assert (found.step, found.num_samples) == (0, 4)
    assert found.accuracy is not None
    [figure] = read_figures(harness.run_dir)
    assert (figure.set, figure.name, figure.value, figure.num_prompts) == ("eval", "accuracy", found.accuracy, 4)
    assert harness.metrics().steps == ()
    assert {(step, lane) for step, lane, *_ in harness.trajectories()} == {(0, "eval")}
    assert not (harness.run_dir / "checkpoints").exists()
    assert not (harness.run_dir / "export").exists()
    status = harness.board.snapshot()
    assert (status.phase, status.step, status.total_steps) == ("done", 0, 0)


async def test_replica_that_serves_other_weights_is_not_used(evaluating):
    async with evaluating() as harness:
        harness.rollouts[0].wrong_digest = True
        await harness.run()
    assert harness.rollouts[0].num_served == 0
    assert harness.rollouts[1].num_served == 4


async def test_driver_that_is_restarted_evaluates_from_the_start(evaluating):
    async with evaluating() as harness:
        await harness.run()
        first = harness.metrics().evaluations
        await harness.run()
    assert [found.means for found in harness.metrics().evaluations] == [found.means for found in first]


async def test_what_would_change_weights_is_a_mistake_of_the_driver(tmp_path):
    model = await start_fixed(generation="", checkpoint=None, report=print)
    for call in (lambda: model.save(tmp_path), lambda: model.follow(None), lambda: model.apply(1.0)):
        with pytest.raises(AssertionError, match="no trainer"):
            await call()
    with pytest.raises(AssertionError, match="no trainer"):
        await model.publish(1)


def test_a_job_that_evaluates_exports_nothing():
    for checkpoint in ({}, {"export": True}, {"exportPolicy": "every"}):
        job = as_evaluation(make_job(task="evaluate", checkpoint=checkpoint))
        assert job.spec.checkpoint.exported_steps == "never"
