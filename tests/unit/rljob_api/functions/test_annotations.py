"""From annotations to JSON schema."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.functions.annotations import UnsupportedTypeError, schema_of


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("str", {"type": "string"}),
        ("int", {"type": "integer"}),
        ("float", {"type": "number"}),
        ("bool", {"type": "boolean"}),
        ("Any", {}),
        ("typing.Any | None", {}),
        ("list", {"type": "array"}),
        ("typing.List[int]", {"type": "array", "items": {"type": "integer"}}),
        ("list[Any]", {"type": "array"}),
        ("dict", {"type": "object"}),
        ("dict[str, bool]", {"type": "object", "additionalProperties": {"type": "boolean"}}),
        ("Optional[int]", {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        ("int | str | None", {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}),
        ("Union[int, Optional[int]]", {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        ("int | int", {"type": "integer"}),
        ("Literal['a', 'b']", {"type": "string", "enum": ["a", "b"]}),
        ("Literal[-1, 2]", {"type": "integer", "enum": [-1, 2]}),
        ("Literal['a', 1, None]", {"enum": ["a", 1, None]}),
        ("'list[int]'", {"type": "array", "items": {"type": "integer"}}),
        ("Annotated[int, 'How many.']", {"type": "integer", "description": "How many."}),
    ],
)
def test_supported_type_has_a_schema(annotation: str, expected: dict[str, Any]) -> None:
    assert schema_of(annotation) == expected


@pytest.mark.parametrize(
    ("annotation", "shown"),
    [
        ("bytes", "bytes"),
        ("list[datetime.date]", "datetime.date"),
        ("dict[int, str]", "dict[int, str]"),
        ("Literal[Color.RED]", "Literal[Color.RED]"),
        ("tuple[int, int]", "tuple[int, int]"),
        ("<class>", "<class>"),
        ("f()", "f()"),
        ("(" * 1000, "(" * 1000),
    ],
)
def test_other_type_is_named(annotation: str, shown: str) -> None:
    with pytest.raises(UnsupportedTypeError) as caught:
        schema_of(annotation)
    assert caught.value.annotation == shown
