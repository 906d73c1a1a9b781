"""Tables of a run's records for the documentation, from the docstrings of their types. Pure."""

import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from rljob_api.run.base import Record, Unit, find_mark, find_part
from rljob_api.run.gauges import Number, list_numbers
from rljob_api.run.metrics import AgentNumbers, EvaluationNumbers, EvaluationRecord, SourceNumbers, StepRecord
from rljob_api.run.trajectories import RecordedRow

_NO_GAUGE = ("type", "step", "time", "prompts", "prompt_sources", "set", "weight_digest")
_SCALARS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def build_step_table() -> str:
    """Return the values of a step, by the parts of its record."""
    numbers = list(list_numbers(StepRecord))
    groups = [(kind, [n for n in numbers if n.path in _own_fields(kind)]) for kind in reversed(StepRecord.__mro__)]
    for kind, path in ((SourceNumbers, "sources/"), (AgentNumbers, "agent/")):
        groups.append((kind, [number for number in numbers if number.path.startswith(path)]))
    rows = (row for kind, found in groups if found for row in (_head(kind), *_list_rows("step", found)))
    return "| value | unit | meaning | gauge |\n|---|---|---|---|\n" + "".join(rows)


def build_evaluation_table() -> str:
    """Return the values that an evaluation alone has."""
    own_fields = _own_fields(EvaluationNumbers) | _own_fields(EvaluationRecord)
    own = [number for number in list_numbers(EvaluationRecord) if number.path in own_fields]
    return "| value | unit | meaning | gauge |\n|---|---|---|---|\n" + "".join(_list_rows("eval", own))


def build_column_table() -> str:
    """Return the columns of the trajectory log."""
    return "| column | type | content |\n|---|---|---|\n" + "".join(_list_columns(RecordedRow, ""))


def _own_fields(kind: type) -> set[str]:
    """Return the fields that a class defines, without those that it narrows."""
    inherited = {name for base in kind.__bases__ for name in getattr(base, "model_fields", {})}
    return set(vars(kind).get("__annotations__", {})) - inherited


def _head(kind: type) -> str:
    summary, _, _ = (inspect.getdoc(kind) or "").partition("\n\n")
    return f"| **{_escape(summary)}** | | | |\n"


def _list_rows(kind: str, numbers: list[Number]) -> Iterator[str]:
    for number in numbers:
        labels = ["set", number.label] if kind == "eval" else [number.label]
        unit, label = find_mark(number.field, Unit), f"{{{', '.join(filter(None, labels))}}}" if any(labels) else ""
        gauge = "" if number.path in _NO_GAUGE else f"`rljob_{kind}_{number.metric}{label}`"
        path, meaning = number.path.replace("*", number.label.upper()), _escape(number.field.description or "")
        yield f"| `{path}` | {unit.name if unit else ''} | {meaning} | {gauge} |\n"


def _list_columns(kind: type[Record], path: str) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        part = find_part(field.annotation)
        yield f"| `{path}{name}` | {_describe_type(field)} | {_escape(field.description or '')} |\n"
        if part is not None:
            yield from _list_columns(part, f"{path}{name}[].")


def _describe_type(field: FieldInfo) -> str:
    if find_part(field.annotation) is not None:
        return "list"
    if get_origin(field.annotation) is dict:
        return "map of numbers"
    kinds: tuple[Any, ...] = (field.annotation, *get_args(field.annotation))
    if any(get_origin(kind) is list for kind in kinds):
        return "list of numbers"
    return next(_SCALARS[kind] for kind in kinds if kind in _SCALARS)


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
