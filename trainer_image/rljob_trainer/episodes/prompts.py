"""Rows to prompts: reading (JSONL, Parquet, hf://), rendering, tokenizing, and the order of their use.

Invariant: the prompt at (epoch, position) is a pure function of the data, the seed and that pair, so a cursor of two
integers resumes exactly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rljob_api.errors import UserError
from rljob_api.manifest.job_sections import Data, DataSource
from rljob_api.wire.protocol import Message
from rljob_trainer.episodes.types import Prompt

Row = dict[str, Any]
_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class Cursor:
    epoch: int = 0
    position: int = 0


def take(num_rows: int, cursor: Cursor, count: int, *, seed: int, shuffle: bool) -> tuple[list[int], Cursor]:
    """Return the next `count` rows of the dataset, across epoch ends, and the cursor after them."""
    taken: list[int] = []
    epoch, position = cursor.epoch, cursor.position
    while len(taken) < count:
        order = epoch_order(num_rows, epoch, seed=seed, shuffle=shuffle)
        chunk = order[position : position + count - len(taken)]
        taken += chunk
        position += len(chunk)
        if position >= num_rows:
            epoch, position = epoch + 1, 0
    return taken, Cursor(epoch, position)


def epoch_order(num_rows: int, epoch: int, *, seed: int, shuffle: bool) -> list[int]:
    if not shuffle:
        return list(range(num_rows))
    return [int(i) for i in np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)]


def load_prompts(data: Data, source: DataSource, where: str, tokenizer: Any, *, split: str) -> list[Prompt]:
    """Return the prompts of `source`, read from `where` (a path or hf://), except those with too many tokens."""
    rows = read_rows(source, where, split=source.split or split)
    if not rows:
        raise UserError(f"spec.data.{split_field(split)}.source: {where} has no rows")
    prompts = [build_prompt(data, source, row, i, tokenizer, split=split) for i, row in enumerate(rows)]
    limit = data.max_prompt_tokens
    kept = [prompt for prompt in prompts if limit is None or len(prompt.token_ids) <= limit]
    if not kept:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        raise UserError(
            f"spec.data.maxPromptTokens is {limit}, but the shortest prompt of {where} has {shortest} tokens; raise it"
        )
    return kept


def split_field(split: str) -> str:
    return "train" if split == "train" else "eval"


def read_rows(source: DataSource, where: str, *, split: str) -> list[Row]:
    if where.startswith("hf://"):
        rows = _read_hub(source, where, split)
    else:
        rows = [row for file in _data_files(Path(where)) for row in _read_file(file)]
    return rows[: source.limit]


def _data_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for file in path.glob("*") if file.suffix in (".jsonl", ".parquet"))
    if not files:
        raise UserError(f"{path}: no such file, and no folder with .jsonl or .parquet files (spec.data)")
    return files


def _read_file(path: Path) -> list[Row]:
    if path.suffix == ".parquet":
        import pyarrow.parquet  # heavy, and most jobs do not need it

        try:
            rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{path}: not a readable Parquet file: {error}") from error
        return rows
    if path.suffix != ".jsonl":
        raise UserError(f"{path}: data must be .jsonl or .parquet, got {path.suffix or 'no suffix'}")
    with path.open(encoding="utf-8") as lines:
        return [_parse_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parse_line(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}:{number}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number}: each line must be a JSON object, got {type(row).__name__}")
    return row


def _read_hub(source: DataSource, where: str, split: str) -> list[Row]:
    import datasets  # heavy, and files do not need it

    name = where.removeprefix("hf://")
    try:
        table = datasets.load_dataset(name, name=source.subset, split=split)
    except Exception as error:  # `datasets` and its hub client raise dozens of types
        raise UserError(f"{where} (subset {source.subset}, split {split}): cannot load the dataset: {error}") from error
    if source.limit is not None:
        table = table.select(range(min(source.limit, len(table))))
    return [dict(row) for row in table]


def build_prompt(data: Data, source: DataSource, row: Row, index: int, tokenizer: Any, *, split: str) -> Prompt:
    """Return one prompt. Raise UserError if a column is missing or has the wrong type."""
    ground_truth = None if source.answer is None else _column(row, source.answer, split, "answer")
    rendered = _render(data, _column(row, source.prompt, split, "prompt"), row)
    given = row.get("extra_info")
    others = {name: value for name, value in row.items() if name not in (source.prompt, source.answer, "extra_info")}
    if isinstance(given, dict):  # verl's files keep extra columns in a column of this name
        others |= given
    elif given is not None:
        others["extra_info"] = given
    return Prompt(
        index=index,
        prompt=rendered,
        token_ids=_tokenize(data, rendered, tokenizer),
        ground_truth=_plain(ground_truth),
        data_source=source.source.split("://", 1)[-1] if source.data_source is None else source.data_source,
        extra_info={**_plain(others), "index": index, "split": source.split or split},
    )


def _column(row: Row, name: str, split: str, what: str) -> Any:
    """Return a column's value; `a.b` reads key b in a column of objects (verl: reward_model.ground_truth)."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(
                f"spec.data.{split_field(split)}.{what}: column {name} not found; columns of the data: {', '.join(row)}"
            )
        value = value[part]
    return value


def _render(data: Data, prompt: Any, row: Row) -> str | list[Message]:
    if isinstance(prompt, str):
        text = fill_template(data.template, {**row, "prompt": prompt})
        if data.format == "text":
            return text
        messages: list[Message] = [{"role": "user", "content": text}]
    elif _are_messages(prompt):
        if data.format == "text":
            raise UserError("spec.data.format is text, but the prompt column holds chat messages; set it to chat")
        messages = [dict(message) for message in prompt]
        if data.template != "{prompt}" and messages:
            content = messages[-1]["content"]
            messages[-1]["content"] = fill_template(data.template, {**row, "prompt": content})
    else:
        raise UserError(
            f"the prompt column must hold strings or lists of {{role, content}} messages, got {type(prompt).__name__}"
        )
    if data.system_prompt is not None and messages[0].get("role") != "system":
        # An empty system message stops a template from adding its default system prompt.
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return messages


def _are_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and bool(prompt)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)
    )


def fill_template(template: str, values: Row) -> str:
    """Replace `{name}` by its value and `{{`, `}}` by braces; keep anything else (LaTeX, JSON) unchanged."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        if name not in values:
            raise UserError(
                f"spec.data.template: {{{name}}} is not a column; columns: {', '.join(values)} "
                f"(write {{{{{name}}}}} for literal braces)"
            )
        return str(values[name])

    return _FIELD.sub(replace, template)


def _tokenize(data: Data, rendered: str | list[Message], tokenizer: Any) -> list[int]:
    if isinstance(rendered, str):
        token_ids = tokenizer(rendered)["input_ids"]
    else:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "spec.data.format is chat, but the model has no chat template; set spec.data.format to text"
            )
        text = tokenizer.apply_chat_template(rendered, add_generation_prompt=True, tokenize=False)
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template adds them
    if not token_ids:
        raise UserError("a prompt of the data is empty after rendering (spec.data.template)")
    return [int(token_id) for token_id in token_ids]


def _plain(value: Any) -> Any:
    """Return `value` as JSON carries it: reward servers receive only JSON."""
    return json.loads(json.dumps(value, default=str))
