"""Which task of a framework's dataset a row of the job means, and the rows of a dataset. Standard library only."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rljob_api.errors import UserError
from rljob_service.worker.episodes.types import Episode


def find_index(episode: Episode, num_tasks: int | None) -> int:
    """Return the row's `index`. Raise UserError if the dataset has no such task. `num_tasks`: None if it is endless."""
    index = episode.columns.get("index")
    if not isinstance(index, int) or index < 0 or (num_tasks is not None and index >= num_tasks):
        has = "has no end" if num_tasks is None else f"has {num_tasks} tasks"
        raise UserError(f"column index: {index!r} is not a task of the environment, whose dataset {has}")
    return index


class Numbered:
    """The tasks of a dataset as rows."""

    def __init__(self, num_tasks: int, read: Callable[[int], Mapping[str, Any]]) -> None:
        self._num_tasks, self._read = num_tasks, read

    def __len__(self) -> int:
        return self._num_tasks

    def __getitem__(self, number: int) -> dict[str, Any]:
        return number_row(self._read(number), number)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(len(self)))


def number_row(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the row of a task: `find_index` finds it by its number. An answer may be null, and is never missing."""
    return {"answer": None, **row, "index": number}
