"""The micro-batches of all ranks, from rows."""

from collections.abc import Sequence
from typing import Any

from rljob_trainer.episodes.types import TrainRow
from rljob_trainer.policy.layout import divide_rows
from rljob_trainer.policy.micro_batches import RankPlan, build_micro_batches


def plan_micro_batches(rows: Sequence[TrainRow], **options: Any) -> list[RankPlan]:
    """Return the micro-batches of each rank; `options`: of divide_rows."""
    return [build_micro_batches(part) for part in divide_rows(rows, **options)]
