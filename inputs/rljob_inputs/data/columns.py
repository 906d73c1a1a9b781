"""What a row must have: the columns that the manifest names, with values of the right type.

Invariant: the check before a run and the run use these functions, so they accept the same rows.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rljob_api.manifest.job_sections import Data, DataSource, GivenSource
from rljob_api.phrases import did_you_mean, list_some
from rljob_api.wire.base import Message
from rljob_inputs.data.conversations import are_messages, ends_with_answer, is_sharegpt, read_messages, split_answer
from rljob_inputs.data.rows import Row
from rljob_inputs.data.text_files import Values
from rljob_inputs.findings import InputError

_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")
_MAX_LISTED = 20


def find_problems(data: Data, source: DataSource, row: Row, field: str) -> Iterator[InputError]:
    """Yield what keeps the row from becoming a prompt: at most one error per field.
    `field`: of the source in the manifest."""
    for read in (lambda: read_prompt(data, source, row, field), lambda: read_answer(source, row, field)):
        try:
            read()
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
            is_given = field.startswith("spec.data.warmStart")
            no_answers = "for rows without answers set answer: null" * (field.endswith(".answer") and not is_given)
            hints = filter(None, [f"it has {_list(known)}", did_you_mean(name, known) or no_answers])
            raise InputError(field, f"{row.place} has no column {name}; {'; '.join(hints)}")
        value = value[part]
    return value


def read_prompt(data: Data, source: DataSource, row: Row, field: str) -> str | list[Message]:
    """Return the prompt: a string, or for chat, a list of messages. Raise InputError if it is neither, or has
    the answer.

    `field`: spec.data.train or spec.data.eval."""
    path = f"{field}.prompt"
    prompt = read_column(row, source.prompt, path)
    _check_prompt(data, prompt, row, path)
    if isinstance(prompt, str):
        return prompt
    if source.answer == source.prompt:
        return split_answer(prompt, row.place, f"{field}.answer")[0]
    if ends_with_answer(prompt):
        problem = "the last message is the assistant's, so the prompt would have the answer"
        remedy = f"set answer: {source.prompt} to use it as the answer, or remove it"
        raise InputError(path, f"{row.place}: {problem}; {remedy}")
    return read_messages(prompt, row.place, path)


def read_answer(source: DataSource, row: Row, field: str) -> Any:
    """Return the ground truth. In the column of the prompt it is the last message's text. Of a given conversation,
    return the messages after the prompt."""
    if isinstance(source, GivenSource):
        return _read_given(source, row, f"{field}.answer")
    if source.answer is None:
        return None
    path = f"{field}.answer"
    value = read_column(row, source.answer, path)
    if source.answer == source.prompt and are_messages(value):
        return split_answer(value, row.place, path)[1]["content"]
    return value


def _read_given(source: GivenSource, row: Row, path: str) -> list[Message]:
    value = read_column(row, source.answer, path)
    if source.answer == source.prompt and are_messages(value):
        found = [split_answer(value, row.place, path)[1]]
    elif isinstance(value, str | int | float):
        found = [{"role": "assistant", "content": str(value)}]
    else:
        found = read_messages(value, row.place, path) if ends_with_answer(value) else []
    if not found or not any(part for name, part in found[-1].items() if name != "role"):
        problem = "is empty" if found else "must be a text, or messages that end with the assistant's, got "
        problem += "" if found else _describe(value)
        raise InputError(path, f"{row.place}: the answer {problem}; fill it in, or remove the row")
    return found


def _check_prompt(data: Data, prompt: Any, row: Row, field: str) -> None:
    if prompt is None:
        raise InputError(field, f"{row.place}: the prompt is null; remove the row, or fill it in")
    if isinstance(prompt, str):
        return
    if is_sharegpt(prompt):
        problem = "the prompt has messages of {from, value}, as ShareGPT"
        raise InputError(field, f"{row.place}: {problem}; rename the keys to role and content, and human to user")
    if not are_messages(prompt):
        expected = "a string or a list of {role, content} messages"
        raise InputError(field, f"{row.place}: the prompt must be {expected}, got {_describe(prompt)}")
    if data.format == "text":
        raise InputError("spec.data.format", "is text, but the prompt column holds chat messages; set it to chat")


def template_fields(template: str) -> list[str]:
    return [name for name in _FIELD.findall(template) if name]


def fill_template(template: str, values: Values, row: Row, field: str = "spec.data.template") -> str:
    """Replace `{name}` by its value and `{{`, `}}` by braces; keep anything else (LaTeX, JSON) unchanged."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        if name not in values:
            raise _unknown_template_field(name, row, field)
        return str(values[name])

    return _FIELD.sub(replace, template)


def _unknown_template_field(name: str, row: Row, field: str = "spec.data.template") -> InputError:
    message = f"{{{name}}} is not a column; {row.place} has {_list(list(row.values))}"
    return InputError(field, f"{message} (write {{{{{name}}}}} for literal braces)")


def _column_names(values: Values) -> Iterator[str]:
    for name, value in values.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{key}" for key in value)


def _list(names: Sequence[str]) -> str:
    return list_some(names, _MAX_LISTED) or "no columns"


def _describe(value: Any) -> str:
    return "an empty list" if value == [] else type(value).__name__
