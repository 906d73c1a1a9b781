"""The micro-batches of all ranks, from rows."""

from collections.abc import Sequence
from typing import Any

from rljob_trainer.episodes.types import TrainRow
from rljob_trainer.policy.layout import RankPlan, build_micro_batches, divide_rows


def plan_micro_batches(rows: Sequence[TrainRow], **options: Any) -> list[RankPlan]:
    """Return the micro-batches of each rank; `options`: of divide_rows."""
    return [build_micro_batches(part) for part in divide_rows(rows, **options)]
