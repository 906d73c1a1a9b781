"""What a row must have: the columns that the manifest names, with values of the right type.

Invariant: the check before a run and the run use these functions, so they accept the same rows.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rljob_api.manifest.job_sections import Data, DataSource
from rljob_inputs.data.rows import Row, Values, split_field
from rljob_inputs.errors import InputError

_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")
_MAX_LISTED = 20


def find_problems(data: Data, source: DataSource, row: Row, split: str) -> Iterator[InputError]:
    """Yield what keeps the row from becoming a prompt: at most one error per field."""
    field = f"spec.data.{split_field(split)}"
    for name, column in (("prompt", source.prompt), ("answer", source.answer)):
        if column is None:
            continue
        try:
            value = read_column(row, column, f"{field}.{name}")
            if name == "prompt":
                check_prompt(data, value, row, f"{field}.prompt")
        except InputError as error:
            yield error
    if unknown := sorted({*template_fields(data.template)} - {"prompt", *row.values}):
        yield _unknown_template_field(unknown[0], row)


def read_column(row: Row, name: str, field: str) -> Any:
    """Return a column's value; `a.b` reads key b in a column of objects (verl: reward_model.ground_truth)."""
    if name in row.values:
        return row.values[name]
    value: Any = row.values
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            known = list(_column_names(row.values))
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(field, f"{row.place} has no column {name}; it has {_list(known)}{hint}")
        value = value[part]
    return value


def check_prompt(data: Data, prompt: Any, row: Row, field: str) -> None:
    """Raise InputError unless it is a string, or for chat, a list of messages."""
    if prompt is None:
        raise InputError(field, f"{row.place}: the prompt is null; remove the row, or fill it in")
    if isinstance(prompt, str):
        return
    if not are_messages(prompt):
        expected = "a string or a list of {role, content} messages"
        raise InputError(field, f"{row.place}: the prompt must be {expected}, got {_describe(prompt)}")
    if data.format == "text":
        raise InputError("spec.data.format", "is text, but the prompt column holds chat messages; set it to chat")


def are_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and bool(prompt)
        and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in prompt)
    )


def template_fields(template: str) -> list[str]:
    return [name for name in _FIELD.findall(template) if name]


def fill_template(template: str, values: Values, row: Row) -> str:
    """Replace `{name}` by its value and `{{`, `}}` by braces; keep anything else (LaTeX, JSON) unchanged."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        if name not in values:
            raise _unknown_template_field(name, row)
        return str(values[name])

    return _FIELD.sub(replace, template)


def _unknown_template_field(name: str, row: Row) -> InputError:
    message = f"{{{name}}} is not a column; {row.place} has {_list(list(row.values))}"
    return InputError("spec.data.template", f"{message} (write {{{{{name}}}}} for literal braces)")


def _column_names(values: Values) -> Iterator[str]:
    for name, value in values.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{key}" for key in value)


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED]) or "no columns"
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"


def _describe(value: Any) -> str:
    return "an empty list" if value == [] else type(value).__name__
