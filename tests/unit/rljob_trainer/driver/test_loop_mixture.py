"""The driver loop with two sources and a curriculum: one order, whatever dies, in driver.json and metrics.jsonl."""

import json
import random

from rljob_api.wire.scores import ScoreResult
from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.prompts import Prompt
from rljob_trainer.feed.prompt_feed import PromptSource
from tests.support.driver_harness import stop_when

MIXED = {
    "data": {"mix": [{"name": "other", "source": "/o.jsonl"}], "curriculum": {"easyEpochs": 4, "hardEpochs": 4}},
    "schedule": {"steps": 12},
    "checkpoint": {"everySteps": 3},
    "evaluation": {"atStart": False},
}
SIZES = {"train": (3.0, 6), "other": (1.0, 3)}


def judge(reward, body):
    """Odd rows always succeed and even ones never, but for row 0, where the first sample does. So do held-out rows."""
    row, sample = body["extra_info"].get("index", 1), int(body["id"].rpartition("/")[2])
    score = float(row % 2) if row else float(sample == 0)
    return ScoreResult(id=body["id"], valid=True, score=score, components={"exact": score})


def place_sources(harness):
    def rows(name, count):
        return {
            i: Prompt(i, f"{name}{i}", [1, 2, 3 + i], "1", extra_info={"index": i}, source=name) for i in range(count)
        }

    harness.judge = judge
    harness.sources = [
        PromptSource(name, weight, PromptSet(count, rows(name, count))) for name, (weight, count) in SIZES.items()
    ]


def order(harness):
    steps = harness.metrics().steps
    return [(list(zip(s.prompt_sources, s.prompts, strict=True)), s.num_skipped_prompts) for s in steps]


async def test_a_killed_driver_draws_the_prompts_of_an_undisturbed_one(make_harness):
    async with make_harness("undisturbed", **MIXED) as harness:
        place_sources(harness)
        await harness.run()
        expected, steps = order(harness), harness.metrics().steps
        state = json.loads(next(harness.run_dir.glob("checkpoints/*/driver.json")).read_text())["lane"]["feed"]
    assert [step.sources["train"].share for step in steps] == [0.75] * 12
    assert sum(step.num_skipped_prompts for step in steps) > 0
    assert 0 < steps[-1].sources["train"].success < 1
    assert set(state["sources"]) == {"train", "other"}
    draw = random.Random(0)
    async with make_harness("killed", **MIXED) as harness:
        place_sources(harness)
        for _ in range(4):
            start, dies_after = len(harness.requests), draw.randrange(5, 120)
            await stop_when(harness, lambda: len(harness.requests) - start >= dies_after)  # noqa: B023
        await harness.run()
        assert order(harness) == expected
