"""Rows that an environment or a program has or makes: env:// sources of the job's data. Standard library only.

Owns pages: which rows, their limits, and that each is JSON. Leaves to adapters and to the user's `rows` which rows a
split has. Invariant: a row is returned as it was made; only a missing `index` is added, its number in the split.
"""

import inspect
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rljob_api.errors import UserError
from rljob_api.wire.contract import MAX_ROW_BYTES
from rljob_service.worker.forms.json_values import NotJsonError, to_json
from rljob_service.worker.forms.outcome import BAD_REQUEST, CallOutcome, describe, failed_call
from rljob_service.worker.forms.results import fields_of

ROWS = "rows"
"""The user's function, or the method of a program's class: takes the split, and returns or yields its rows."""
INDEX = "index"
MAX_PAGE_SECONDS = 10.0
"""A page ends with the row that takes it longer: slow rows need no long request, and the job's status shows how many
there are."""

List = Callable[[str], Any]
"""Returns all rows of a split in order: a sequence, or anything else that can be iterated, perhaps without end."""


class _Opened(NamedTuple):
    """The rows of one split."""

    rows: Sequence[Any] | None
    """None if they can only be iterated."""
    iterator: Iterator[Any]
    position: int
    """Number of the iterator's next row."""


class RowReader:
    def __init__(self, list_rows: List) -> None:
        self._list_rows = list_rows
        self._opened: dict[str, _Opened] = {}

    def read(self, arguments: Mapping[str, Any]) -> CallOutcome:
        """Return the page that a RowsCall asks for, or why there is none. What user code raises is the caller's."""
        try:
            return CallOutcome(self._read_page(arguments["split"], arguments["start"], arguments["count"]))
        except UserError as error:
            return failed_call(BAD_REQUEST, str(error))
        except NotJsonError as error:
            return failed_call(BAD_REQUEST, f"{error}; return text, numbers, True, False, None, lists and dicts")
        except RecursionError:
            return failed_call(BAD_REQUEST, "a row is nested too deeply")

    def _read_page(self, split: str, start: int, count: int) -> dict[str, Any]:
        found = self._open(split, start)
        total = None if found.rows is None else len(found.rows)
        page: list[dict[str, Any]] = []
        ends_at, num_bytes, is_last = time.monotonic() + MAX_PAGE_SECONDS, 0, True
        for value in found.iterator:
            row, size = _read_row(value, start + len(page))
            page.append(row)
            num_bytes += size
            if len(page) == count or num_bytes >= MAX_ROW_BYTES or time.monotonic() >= ends_at:
                is_last = total is not None and start + len(page) >= total
                break
        self._opened[split] = found._replace(position=start + len(page))
        return {"rows": page, "total": total, "is_last": is_last}

    def _open(self, split: str, start: int) -> _Opened:
        """Return the rows from `start` on. Pages come in order, so an iterator usually continues where it is."""
        found = self._opened.pop(split, None)  # one that raises is not used again
        if found is not None and found.rows is None and found.position == start:
            return found
        rows = self._list_rows(split) if found is None or found.rows is None else found.rows
        if inspect.isawaitable(rows) or hasattr(rows, "__aiter__"):
            raise UserError(f"{ROWS} must not be async; define it with def")
        if isinstance(rows, (str, bytes, Mapping)) or not (hasattr(rows, "__iter__") or hasattr(rows, "__getitem__")):
            raise UserError(
                f"{ROWS}({split!r}) returned {describe(rows)}; return a list of dicts, or yield them; "
                "raise ValueError for a split that does not exist"
            )
        if hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
            return _Opened(rows, (rows[number] for number in range(start, len(rows))), start)
        return _Opened(None, itertools.islice(iter(rows), start, None), start)


def _read_row(value: Any, number: int) -> tuple[dict[str, Any], int]:
    """Return a row and its bytes as JSON. Raise UserError and NotJsonError for what cannot be a row."""
    fields = fields_of(value)
    if fields is None:
        raise UserError(f"row {number} is {describe(value)}; it must be a dict, from columns to values")
    row = to_json(fields, f"row {number}")
    row.setdefault(INDEX, number)
    size = len(json.dumps(row))
    if size > MAX_ROW_BYTES:
        raise UserError(f"row {number} has {size >> 10} KiB as JSON, at most {MAX_ROW_BYTES >> 10} KiB; shorten it")
    return row, size


def describe_missing(what: str) -> str:
    """Return why there are no rows. `what`: has none."""
    return (
        f"{what} has no rows of its own: add a function {ROWS}(split) to the file of agent.runner.function, which "
        "returns or yields them as dicts, or name a file as the source"
    )
