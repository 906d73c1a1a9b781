"""Which task of a framework's dataset a row of the job means. Standard library only."""

from __future__ import annotations

from rljob_api.errors import UserError
from rljob_service.worker.episodes.types import Episode


def find_index(episode: Episode, num_tasks: int | None) -> int:
    """Return the row's `index`. Raise UserError if the dataset has no such task. `num_tasks`: None if it is endless."""
    index = episode.columns.get("index")
    if not isinstance(index, int) or index < 0 or (num_tasks is not None and index >= num_tasks):
        has = "has no end" if num_tasks is None else f"has {num_tasks} tasks"
        raise UserError(f"column index: {index!r} is not a task of the environment, whose dataset {has}")
    return index
