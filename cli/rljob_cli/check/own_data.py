"""The user's rows in a job of `rljob init`: their columns, the rows held out for evaluation, and completions to score.

Invariant: no row is both trained on and evaluated with, and every value is a valid YAML scalar.
"""

import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.job_sections import Data, TrainSource
from rljob_api.manifest.sources import parse_source
from rljob_cli.output import say, to_text
from rljob_inputs.data.columns import read_answer, read_prompt
from rljob_inputs.data.conversations import ends_with_answer
from rljob_inputs.data.files import list_splits
from rljob_inputs.data.rows import Row, read_rows
from rljob_inputs.findings import InputError
from rljob_inputs.hub import read_source
from rljob_inputs.machine.bounded import bounded

_PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "conversations", "instruction", "input", "query")
_OF_VERL = "reward_model.ground_truth"
_ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "label", "output", "response", "target", _OF_VERL)
_MAX_HELD_OUT = 64
_HELD_OUT_SHARE = 10
"""One row of so many is held out."""
_NUM_SHOWN = 3
_YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


@dataclass(frozen=True)
class OwnData:
    """The user's rows. None: chosen by common names."""

    source: str
    prompt: str | None = None
    answer: str | None = None


@dataclass(frozen=True)
class OwnParts:
    values: dict[str, str]
    """Placeholders of the template."""
    completions: str
    """Contents of completions.jsonl; empty if no row was read."""


@bounded
def describe_own(data: OwnData, directory: Path) -> OwnParts:
    """Return what a job with these rows needs. Raise UserError if they, or the columns, cannot be read."""
    data = replace(data, source=read_source(data.source, Path()))
    if "://" in data.source:
        if parse_source(data.source).kind == "env":
            raise UserError(
                "--data must be a file or hf://org/name; for rows of an agent, set data.train.source in the job"
            )
        source = TrainSource(source=data.source, prompt=data.prompt or "prompt", answer=data.answer or "answer")
        return OwnParts(_place(source, data.source, _MAX_HELD_OUT, "train"), "")
    path = Path(data.source)
    rows = _read_first(data.source)
    if not rows:
        raise UserError(f"--data {path}: has no rows")
    source = _choose_columns(data, rows[0])
    splits = list_splits(path)
    has_test = "test" in splits
    held_out = 0 if has_test else min(_MAX_HELD_OUT, len(rows) // _HELD_OUT_SHARE)
    split = None if has_test else "train" if splits else ""
    values = _place(source, quote(relative_to(data.source, directory)), held_out, split)
    if source.answer is None:
        say(f"no answer among the columns {', '.join(rows[0].values)}: the job has answer: null; else pass --answer")
    return OwnParts(values, build_completions(source, rows[:_NUM_SHOWN]))


def _read_first(source: str) -> list[Row]:
    """Return as many rows as decide on the number of those held out."""
    try:
        rows = read_rows(TrainSource(source=source), source, split="train", is_check=True)
        return list(itertools.islice(rows, _MAX_HELD_OUT * _HELD_OUT_SHARE))
    except InputError as error:
        raise UserError(f"--data {error.message}") from None


def _choose_columns(data: OwnData, row: Row) -> TrainSource:
    columns, of_verl = list(row.values), row.values.get("reward_model")
    columns += [_OF_VERL] if isinstance(of_verl, dict) and "ground_truth" in of_verl else []
    prompt = _choose(data.prompt, _PROMPT_COLUMNS, columns, "--prompt")
    is_known = data.answer or any(name in columns for name in _ANSWER_COLUMNS)
    answer = _choose(data.answer, _ANSWER_COLUMNS, columns, "--answer") if is_known else None
    if data.answer is None and ends_with_answer(row.values.get(prompt)):
        answer = prompt
    return TrainSource(source=data.source, prompt=prompt, answer=answer)


def _choose(given: str | None, common: tuple[str, ...], columns: list[str], option: str) -> str:
    """Return the column of an option, or the first common name among the columns."""
    found = given or next((name for name in common if name in columns), None)
    # reward_model.ground_truth is a key in the column reward_model.
    if found is None or (found not in columns and found.partition(".")[0] not in columns):
        got = f", got {given}" if given else ""
        raise UserError(f"{option} must be a column of the rows{got}; they have {', '.join(columns)}")
    return found


def _place(source: TrainSource, location: str, held_out: int, split: str | None) -> dict[str, str]:
    """Return the placeholders. `split`: of the held-out rows; empty: the data has none; None: use its split test."""
    columns = f"prompt: {quote(source.prompt)}, answer: {quote(source.answer) if source.answer else 'null'}"
    fields = f"source: {location}, {columns}"
    accuracy = "\n  evaluation:\n    accuracy: exact        # the component of the reward that counts as accuracy"
    common = {"template": '"{prompt}"', "accuracy": accuracy if source.answer else ""}
    if split is None:
        return common | {"train": f"{{{fields}}}", "held_out": f"eval: {{{fields}}}    # its split test"}
    if not held_out:
        comment = "# Rows that are not trained on, to evaluate with:"
        return common | {
            "train": f"{{{fields}}}",
            "held_out": f"{comment}\n    # eval: {{source: ./eval.jsonl, {columns}}}",
        }
    of_split = f", split: {split}" if split else ""
    comment = f"# The first {held_out} rows are not trained on, to evaluate with:"
    return common | {
        "train": f"{{{fields}, offset: {held_out}}}",
        "held_out": f"{comment}\n    eval: {{{fields}{of_split}, limit: {held_out}}}",
    }


def build_completions(source: TrainSource, rows: Sequence[Row]) -> str:
    """Return JSON lines for `rljob test-reward`: the answer of each row, and of the first row also the answer
    in a sentence and a completion that only has it somewhere."""
    data = Data(given_train=source)
    lines: list[dict[str, Any]] = []
    for row in rows:
        try:
            prompt = read_prompt(data, source, row, "spec.data.train")
            answer = read_answer(source, row, "spec.data.train")
        except InputError:
            continue  # `rljob validate` explains it
        used = {source.prompt, source.answer, "prompt", "completion", "answer", "group"}
        others = {name: value for name, value in row.values.items() if name not in used}
        shown = to_text(answer)
        texts = [shown] if lines else [shown, f"It is {shown}.", f"{shown} or something else"]
        texts = texts if source.answer else ["A short reply.", "word " * 60]
        lines += [{"prompt": prompt, "completion": text, "answer": answer, **others} for text in texts]
    return "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)


def relative_to(path: str, directory: Path) -> str:
    """Return a path that starts at the job's folder."""
    if os.path.isabs(path):
        return path
    relative = os.path.relpath(path, directory)
    return relative if relative.startswith("..") else f"./{relative}"


def quote(text: str) -> str:
    """Return text as a YAML scalar: plain if it can be."""
    return text if re.fullmatch(r"[A-Za-z_./][\w./-]*", text) and text.lower() not in _YAML_WORDS else json.dumps(text)
