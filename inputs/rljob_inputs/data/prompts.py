"""Rows to prompts: rendering, tokenizing, and leaving out those that are too long for the model.

The tokenizer is injected: the trainer's is transformers', that of a check has no heavy import. Invariant: a prompt
depends on its row and the manifest alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rljob_api.manifest.job_sections import Data, DataSource
from rljob_api.manifest.sources import parse_source
from rljob_api.wire.base import Message
from rljob_api.wire.scores import ScoreRequest
from rljob_inputs.data.columns import fill_template, read_answer, read_prompt, template_fields
from rljob_inputs.data.lengths import PromptLimit, measure
from rljob_inputs.data.rows import Row, read_rows, split_field
from rljob_inputs.findings import InputError, LengthTable, describe_all_too_long
from rljob_inputs.hub import HubAccess
from rljob_inputs.prompts import Prompt
from rljob_inputs.score_requests import list_columns

_BATCH_PROMPTS = 1_000
"""Prompts per call of the tokenizer, which works on several of them at once."""


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a dataset by row, without those that are too long."""

    num_rows: int
    by_row: Mapping[int, Prompt]

    def named(self, source: str) -> PromptSet:
        """Return the set with the name of its source in each prompt."""
        if not source:
            return self
        return replace(self, by_row={row: replace(prompt, source=source) for row, prompt in self.by_row.items()})


def load_prompts(
    data: Data,
    source: DataSource,
    location: str,
    tokenizer: Any,
    *,
    split: str,
    limit: PromptLimit,
    access: HubAccess | None = None,
    field: str = "",
) -> tuple[PromptSet, LengthTable]:
    """Read all rows at `location` (a path or hf://) and build their prompts. Return them with a table of all lengths.
    `field`: of the source in the manifest; empty: spec.data.train or spec.data.eval, by `split`.

    Raise InputError if a row is unusable or every prompt is too long, and TransientError if the Hub cannot be reached.
    """
    field = field or split_field(split)
    rows = read_rows(source, location, split=split, access=access, field=field)
    prompts = list(build_prompts(data, source, rows, tokenizer, split=split, field=field))
    if not prompts:
        raise InputError(f"{field}.source", f"{location} has no rows")
    table = measure([len(prompt.token_ids) for prompt in prompts], field, len(prompts), limit)
    if table.num_too_long == len(prompts):
        raise InputError(f"{field}.source", describe_all_too_long(table))
    kept = {prompt.index: prompt for prompt in prompts if limit.admits(len(prompt.token_ids))}
    return PromptSet(len(prompts), kept), table


def build_prompts(
    data: Data, source: DataSource, rows: Iterable[Row], tokenizer: Any, *, split: str, field: str = ""
) -> Iterator[Prompt]:
    """Yield one prompt per row. Raise InputError at the first unusable row. `field`: as of `load_prompts`."""
    field = field or split_field(split)
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, _BATCH_PROMPTS)):
        rendered = [render(data, source, row, field) for row in batch]
        tokens = tokenize(data, rendered, tokenizer)
        for row, text, token_ids in zip(batch, rendered, tokens, strict=True):
            if not token_ids:
                raise InputError("spec.data.template", f"{row.place}: the prompt is empty after rendering")
            yield build_prompt(source, row, text, token_ids, split, field)


def build_prompt(
    source: DataSource, row: Row, rendered: str | list[Message], token_ids: list[int], split: str, field: str
) -> Prompt:
    answer = read_answer(source, row, field)
    given = row.values.get("extra_info")
    used = ("prompt" if source.prompt == "prompt" else None, source.answer, "extra_info")
    others = {name: value for name, value in row.values.items() if name not in used}
    if isinstance(given, dict):  # verl's files keep extra columns in a column of this name
        others |= given
    elif given is not None:
        others["extra_info"] = given
    return Prompt(
        index=row.position,
        prompt=rendered,
        token_ids=token_ids,
        ground_truth=_plain(answer),
        answer_column=source.answer if source.answer in row.values and source.answer != source.prompt else "",
        data_source=find_data_source(source, row.values),
        extra_info={"index": row.position, "split": source.split or split, **_plain(others)},
    )


def find_data_source(source: DataSource, values: Mapping[str, Any]) -> str:
    """Return what rewards get as data_source: the setting, else the row's column of this name, as verl's files have it,
    else the repository's id or the file's name."""
    if source.data_source is not None:
        return source.data_source
    own = values.get("data_source")
    return own if isinstance(own, str) else parse_source(source.source).name


def render(data: Data, source: DataSource, row: Row, field: str) -> str | list[Message]:
    """Return the text, or the messages, of a row. `field`: of the source in the manifest."""
    prompt = read_prompt(data, source, row, field)
    if not isinstance(prompt, str):
        messages = prompt
        if data.template != "{prompt}":
            content = messages[-1]["content"]
            messages[-1]["content"] = fill_template(data.template, {**row.values, "prompt": content}, row)
    else:
        text = fill_template(data.template, {**row.values, "prompt": prompt}, row)
        if data.format == "text":
            return text
        messages = [{"role": "user", "content": text}]
    if data.system_prompt is not None and messages[0].get("role") != "system":
        # An empty system message stops a template from adding its default system prompt.
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return messages


def tokenize(data: Data, rendered: list[str | list[Message]], tokenizer: Any) -> list[list[int]]:
    """Return the token ids of each prompt. Raise InputError if the model has no chat template, or it fails."""
    if data.format == "text":
        return _as_lists(tokenizer(rendered)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        remedy = "set it to text, or set spec.model.chatTemplate"
        raise InputError("spec.data.format", f"is chat, but the model has no chat template; {remedy}")
    try:
        texts = [
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **data.chat_template_arguments
            )
            for messages in rendered
        ]
    except Exception as error:  # jinja2's own, and whatever the template raises
        raise InputError("spec.data.format", f"the chat template fails: {type(error).__name__}: {error}") from error
    return _as_lists(tokenizer(texts, add_special_tokens=False)["input_ids"])  # the template adds them


def write_hint(data: Data, hint: str, row: Prompt | ScoreRequest, tokenizer: Any, field: str) -> list[int]:
    """Return the tokens of a teacher's hint for a row, which it reads before what the policy saw: a text, or for chat a
    message of its own, of the system, or of the user if the template has none of the system. Raise InputError if the
    row has no such column, or the template writes no message alone. `field`: of the hint."""
    columns = list_columns(row)
    index = columns.get("index")  # of the data set, if it has one
    place = f"row {index + 1 if isinstance(index, int) else index} of {row.data_source}"
    if missing := sorted(name for name in template_fields(hint) if name in columns and columns[name] in (None, "")):
        remedy = "fill it in, or leave out such rows with teacher.when"
        raise InputError(field, f"{place} has nothing in {missing[0]}; {remedy}")
    text = fill_template(hint, columns, Row(columns, 0, place), field)
    if data.format == "text":
        return tokenize(data, [text], tokenizer)[0]
    for role in ("system", "user"):
        with contextlib.suppress(Exception):  # jinja2's own, and whatever the template raises
            rendered = tokenizer.apply_chat_template(
                [{"role": role, "content": text}],
                add_generation_prompt=False,
                tokenize=False,
                **data.chat_template_arguments,
            )
            if text.strip() in rendered:
                return _as_lists(tokenizer([rendered], add_special_tokens=False)["input_ids"])[0]
    raise InputError(field, "the chat template writes no message alone; set model.chatTemplate to one that does")


def _as_lists(batch: Any) -> list[list[int]]:
    return [[int(token_id) for token_id in token_ids] for token_ids in batch]


def _plain(value: Any) -> Any:
    """Return `value` as JSON carries it: reward servers receive only JSON."""
    return json.loads(json.dumps(value, default=str))
