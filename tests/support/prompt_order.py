"""Which prompts an undisturbed run of the quickstart's data trains on, computed from its seed alone."""

from __future__ import annotations

from itertools import chain, count, islice

from rljob_api.manifest.schedule import Schedule
from rljob_trainer.feed.prompt_feed import epoch_order
from tests.paths import EXAMPLES


def expect_prompts(num_steps: int, prompts_per_step: int) -> list[list[int]]:
    """Return the rows of each step: `schedule.seed` orders each epoch."""
    num_rows = len((EXAMPLES / "quickstart/data/train.jsonl").read_text().splitlines())
    seed, wanted = Schedule().seed, num_steps * prompts_per_step
    orders = (epoch_order(num_rows, epoch, seed=seed, shuffle=True).tolist() for epoch in count())
    rows = list(islice(chain.from_iterable(orders), wanted))
    return [rows[start : start + prompts_per_step] for start in range(0, wanted, prompts_per_step)]
