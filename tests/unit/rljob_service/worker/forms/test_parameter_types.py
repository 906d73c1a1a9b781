"""From types to JSON schema."""

from __future__ import annotations

import datetime
import enum
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Optional, Union

import pytest

from rljob_service.worker.forms.parameter_types import UnsupportedTypeError, schema_of
from tests.support.agent_functions import load_tools


class Color(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (Any, {}),
        (Any | None, {}),
        (list, {"type": "array"}),
        (typing.List[int], {"type": "array", "items": {"type": "integer"}}),  # noqa: UP006
        (Sequence[int], {"type": "array", "items": {"type": "integer"}}),
        (list[Any], {"type": "array"}),
        (dict, {"type": "object"}),
        (dict[str, bool], {"type": "object", "additionalProperties": {"type": "boolean"}}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045
        (int | str | None, {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}),
        (Union[int, Optional[int]], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP007, UP045
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[-1, 2], {"type": "integer", "enum": [-1, 2]}),
        (Literal["a", 1, None], {"enum": ["a", 1, None]}),
        (Annotated[int, "How many."], {"type": "integer", "description": "How many."}),
        (list[Annotated[int, Color.RED]], {"type": "array", "items": {"type": "integer"}}),
    ],
)
def test_supported_type_has_a_schema(annotation: Any, expected: dict[str, Any]) -> None:
    assert schema_of(annotation) == expected


@pytest.mark.parametrize(
    ("annotation", "shown"),
    [
        (bytes, "bytes"),
        (list[datetime.date], "date"),
        (dict[int, str], "dict[int, str]"),
        (Literal[Color.RED], "typing.Literal[<Color.RED: 'red'>]"),
        (tuple[int, int], "tuple[int, int]"),
        (Color, "Color"),
    ],
)
def test_other_type_is_named(annotation: Any, shown: str) -> None:
    with pytest.raises(UnsupportedTypeError) as caught:
        schema_of(annotation)
    assert str(caught.value) == shown


def test_type_without_a_schema_is_hidden_by_its_value() -> None:
    source = "class Odd:\n    pass\n\ndef f(a: str, odd: Odd = None): return a"
    assert [schema["name"] for schema in load_tools(source, kwargs={"odd": 1}).tools] == ["f"]
