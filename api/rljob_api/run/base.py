"""The base of a run's records, and the units and labels of their numbers.

Invariants: an unknown value is null, never zero; a reader ignores fields that it does not know, and takes a missing
field as unknown. So it also reads what a different version wrote.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)


@dataclass(frozen=True)
class Unit:
    """The unit of a number, for the documentation."""

    name: str


@dataclass(frozen=True)
class Label:
    """Marks a map whose keys are data: /metrics has one gauge with this label, and each key as its value."""

    name: str
    metric: str = ""
    """Name of the gauge; empty: that of the field."""


Count = Annotated[int, Unit("count")]
Tokens = Annotated[float, Unit("tokens")]
Seconds = Annotated[float, Unit("s")]
Share = Annotated[float, Unit("0 to 1")]
Score = Annotated[float, Unit("score")]
Nats = Annotated[float, Unit("nats")]

_Mark = TypeVar("_Mark", Unit, Label)


def find_mark(field: FieldInfo, kind: type[_Mark]) -> _Mark | None:
    """Return the unit or the label of a field, also of the values of a map."""
    return next((mark for mark in (*field.metadata, *_list_marks(field.annotation)) if isinstance(mark, kind)), None)


def find_part(kind: Any) -> type[Record] | None:
    """Return the type of the records in an annotation: of a list, of the values of a map, or of the field itself."""
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind
    return next((part for argument in get_args(kind) if (part := find_part(argument)) is not None), None)


def _list_marks(annotation: Any) -> list[Any]:
    inner = [mark for argument in get_args(annotation) for mark in _list_marks(argument)]
    return [*getattr(annotation, "__metadata__", ()), *inner]
