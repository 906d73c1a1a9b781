"""The names that trackers and /metrics have for the numbers of a record. Pure.

A tracker's name is the path: `step/grad_norm`, `step/components/exact`. Invariant: the name of a gauge has no data,
such as the name of a component, a reward or a tool: these are labels. So a panel shows all components, and a user's
name is never part of an identifier.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from rljob_api.run.base import Label, Record, find_mark, find_part
from rljob_api.run.metrics import AnyRecord, EvaluationRecord, StepRecord


class Gauge(NamedTuple):
    metric: str
    label: str = ""
    """Empty: the metric has no label."""
    value: str = ""


def name_series(record: AnyRecord) -> str:
    """Return the prefix of a record's names in trackers: step, checkpoint, eval; of other sets than eval eval/SET."""
    if isinstance(record, EvaluationRecord) and record.set != record.type:
        return f"{record.type}/{record.set}"
    return record.type


class Number(NamedTuple):
    """A number, a map of numbers, or a map of records, by its type."""

    path: str
    """From the record, joined by slashes; `*` stands for the key of a map of records."""
    field: FieldInfo
    metric: str
    """Without its prefix, rljob_step or rljob_eval."""
    label: str


def list_numbers(kind: type[Record], path: str = "", metric: str = "", label: str = "") -> Iterator[Number]:
    """Yield what a record of this type may have, in its order; the parts of a part one by one."""
    for name, field in kind.model_fields.items():
        mark, part = find_mark(field, Label), find_part(field.annotation)
        gauge, own_label = f"{metric}{(mark and mark.metric) or name}", mark.name if mark else label
        if part is not None:
            yield from list_numbers(part, f"{path}{name}/{'*/' if mark else ''}", f"{gauge}_", own_label)
        else:
            yield Number(f"{path}{name}", field, gauge, own_label)


_LABELLED = {
    number.path: number for kind in (StepRecord, EvaluationRecord) for number in list_numbers(kind) if number.label
}


def name_gauge(kind: str, name: str) -> Gauge:
    """Return the gauge of a number. `name`: its path in the record, of `flatten`."""
    prefix = f"rljob_{kind}_"
    for path, number in _LABELLED.items():
        begin, star, end = path.partition("*")
        if star and name.startswith(begin) and name.endswith(end):
            return Gauge(f"{prefix}{number.metric}", number.label, name.removeprefix(begin).removesuffix(end))
        if not star and name.startswith(f"{path}/"):
            return Gauge(f"{prefix}{number.metric}", number.label, name.removeprefix(f"{path}/"))
    return Gauge(f"{prefix}{name.replace('/', '_')}")


def flatten(record: AnyRecord) -> dict[str, float]:
    """Return the known numbers of a record by their paths, without the step and the time."""
    return dict(_flatten(record.model_dump(exclude={"step", "time"}), ""))


def _flatten(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)
