"""Evaluation sets in the loop: their rewards, samples and steps, and the best step, whatever dies."""

import json

from rljob_api.run.folder import complete_checkpoints
from tests.unit.rljob_trainer.driver.test_driver_deaths import stop_when

MATH = {
    "name": "math",
    "data": {"source": "/m.jsonl"},
    "sampling": {"temperature": 1.0},
    "samplesPerPrompt": 3,
    "rewards": ["strict"],
    "accuracy": "exact",
}
REWARDS = [
    {"name": "correct", "function": {"inline": "x"}, "use": "training"},
    {"name": "plain", "function": {"inline": "x"}, "weight": 0.5},
    {"name": "strict", "function": {"inline": "x"}, "use": "evaluation", "weight": 2.0},
]
SETTINGS = {
    "rewards": REWARDS,
    "schedule": {"steps": 4},
    "checkpoint": {"everySteps": 4, "keep": 1},
    "evaluation": {"everySteps": 2, "sets": [MATH | {"everySteps": 1, "atStart": False}]},
}


async def test_each_set_has_its_prompts_samples_rewards_and_steps(make_harness):
    async with make_harness(**SETTINGS) as harness:
        summary = await harness.run()
    metrics, rows = harness.metrics(), harness.trajectories().values()
    found = {(each.set, each.step): each for each in metrics.evaluations}
    assert sorted(found) == [("eval", 0), ("eval", 2), ("eval", 4), *(("math", step) for step in (1, 2, 3, 4))]
    math = found["math", 2]
    assert (math.num_prompts, math.num_samples, math.samples_per_prompt, math.num_results) == (4, 12, 3, 12)
    assert set(math.pass_at) == {1, 2, 3}
    assert math.pass_at[1] <= math.pass_at[2] <= math.pass_at[3]
    by_set = {name: [row for row in rows if row.set == name] for name in ("eval", "math", None)}
    names = {name: {result.name for row in found for result in row.rewards} for name, found in by_set.items()}
    assert names == {"eval": {"plain", "strict"}, "math": {"strict"}, None: {"correct", "plain"}}
    assert all(row.score == 2.0 * row.rewards[0].score for row in by_set["math"]), "the sum of its own rewards"
    assert len({row.completion for row in by_set["math"] if row.step == 2 and row.prompt == "e0"}) > 1, "three samples"
    assert summary.rewards_served == 4 * 16 * 2 + 3 * 4 * 2 + 4 * 12
    ids = [body["id"] for body in harness.requests]
    assert len({name for name in ids if "/eval/2/" in name}) == 4 + 12, "no id is of two sets"


async def test_numbers_of_each_set_have_names_of_their_own(make_harness):
    async with make_harness(**SETTINGS | {"schedule": {"steps": 2}}) as harness:
        await harness.run()
        status = harness.board.snapshot()
    last = {each.set: each.accuracy for each in harness.metrics().evaluations}
    assert status.accuracies == last
    assert status.accuracy == last["eval"], "the first set is that of the run"


async def test_checkpoint_of_the_best_step_stays_and_is_named(make_harness):
    async with make_harness(**best_settings()) as harness:
        summary = await harness.run()
    best = json.loads((harness.run_dir / "best.json").read_text())
    accuracies = {each.step: each.accuracy for each in harness.metrics().evaluations if each.set == "math"}
    expected = max(accuracies, key=lambda step: (accuracies[step], -step))
    assert (best["step"], best["value"]) == (expected, accuracies[expected])
    assert expected < 6, "or it would be kept as the newest one"
    assert best["checkpoint"] == f"checkpoints/step-{expected:06d}"
    assert list(complete_checkpoints(harness.run_dir)) == [expected, 6], "checkpoint.keep is 1"
    assert summary.best.step == harness.board.snapshot().best_step == expected


async def test_best_step_survives_a_driver(make_harness):
    async with make_harness("whole", **best_settings()) as harness:
        expected = (await harness.run()).best
    async with make_harness("stopped", **best_settings()) as harness:
        await stop_when(harness, lambda: any("/eval/4/" in body["id"] for body in harness.requests))
        assert len(complete_checkpoints(harness.run_dir)) >= 2
        found = (await harness.run()).best
        steps = [(each.set, each.step) for each in harness.metrics().evaluations]
    assert found == expected
    assert len(set(steps)) == len(steps), "an evaluation is in the history once"


def best_settings():
    evaluation = {"everySteps": 2, "sets": [MATH], "best": {"set": "math"}}
    return {"rewards": REWARDS, "checkpoint": {"everySteps": 6, "keep": 1}, "evaluation": evaluation}
