"""Arguments of tools: what is converted, what is refused, and that both agree with JSON schema."""

from __future__ import annotations

import typing
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_service.worker.forms.arguments import ArgumentError, check_arguments, show_call
from rljob_service.worker.forms.parameter_types import schema_of


def read_type(text: str) -> dict[str, Any]:
    return schema_of(eval(text, vars(typing).copy()))


def check(annotation: str, value: Any) -> Any:
    parameters = {"type": "object", "properties": {"x": read_type(annotation)}, "required": ["x"]}
    return check_arguments("f", parameters, {"x": value})["x"]


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        ("int", 3, 3),
        ("int", "3", 3),
        ("int", " -3 ", -3),
        ("int", 3.0, 3),
        ("float", 3, 3),
        ("float", "3.5", 3.5),
        ("float", "1e3", 1000.0),
        ("str", 3, "3"),
        ("str", 3.5, "3.5"),
        ("bool", "True", True),
        ("bool", "false", False),
        ("list[int]", "[1, 2]", [1, 2]),
        ("list[int]", ["1", 2], [1, 2]),
        ("dict[str, float]", '{"a": "1"}', {"a": 1}),
        ("Literal[1, 2]", "2", 2),
        ("Literal['1', '2']", 2, "2"),
        ("int | str", "3", "3"),
        ("int | bool", "true", True),
        ("int | None", None, None),
        ("int | None", "3", 3),
        ("list[int] | int", ["3"], [3]),
        ("Any", {"a": [None]}, {"a": [None]}),
    ],
)
def test_argument_with_one_meaning_is_converted(annotation: str, value: Any, expected: Any) -> None:
    found = check(annotation, value)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        ("int", "three", 'x must be an integer, got "three"'),
        ("int", 3.5, "x must be an integer, got 3.5"),
        ("int", True, "x must be an integer, got true"),
        ("int", None, "x must be an integer, got null"),
        ("float", True, "x must be a number, got true"),
        ("float", "nan", 'x must be a number, got "nan"'),
        ("str", True, "x must be a string, got true"),
        ("str", ["a"], 'x must be a string, got ["a"]'),
        ("bool", 1, "x must be true or false, got 1"),
        ("list[int]", [1, "b"], 'x[1] must be an integer, got "b"'),
        ("list[int]", 1, "x must be an array of integer, got 1"),
        ("list", "[1", 'x must be an array, got "[1"'),
        ("dict[str, int]", {"a": {}}, "x.a must be an integer, got {}"),
        ("Literal['a', 'b']", "c", 'x must be one of "a", "b", got "c"'),
        ("Literal[1]", True, "x must be one of 1, got true"),
        ("int | None", "x", 'x must be an integer or null, got "x"'),
        ("int", "9" * 200, None),
        ("int", "9" * 5000, "9" * 50),
    ],
)
def test_wrong_argument_is_refused_with_what_is_expected(annotation: str, value: Any, message: str | None) -> None:
    if message is None:
        assert check(annotation, value) == int(value)
        return
    with pytest.raises(ArgumentError) as caught:
        check(annotation, value)
    assert message in str(caught.value)
    assert "Expected: f(x: " in str(caught.value)
    assert len(str(caught.value)) < 500


def test_every_problem_of_a_call_is_named() -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
        "required": ["city"],
    }
    with pytest.raises(ArgumentError) as caught:
        check_arguments("weather", parameters, {"cty": "Rome", "days": "two", "q": 1})
    assert str(caught.value) == (
        "missing argument city; unknown argument cty (did you mean city?); "
        'days must be an integer, got "two"; unknown argument q. '
        "Expected: weather(city: string, days: integer = 1)"
    )
    assert show_call("weather", parameters) == "weather(city: string, days: integer = 1)"


SIMPLE = st.sampled_from(["str", "int", "float", "bool", "Any", "list", "dict", "Literal['a', 'b']", "Literal[1, 'x']"])
ANNOTATIONS = st.recursive(
    SIMPLE,
    lambda inner: (
        inner.map("list[{}]".format)
        | inner.map("dict[str, {}]".format)
        | inner.map("Optional[{}]".format)
        | st.tuples(inner, inner).map(" | ".join)
    ),
    max_leaves=4,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-3, 3) | st.sampled_from(["a", "x", "3", "true", "[1]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=5,
)


@given(ANNOTATIONS, VALUES)
def test_check_agrees_with_json_schema(annotation: str, value: Any) -> None:
    """What is valid stays as it is; what is converted becomes valid; nothing invalid passes."""
    schema = read_type(annotation)
    validator = jsonschema.Draft202012Validator(schema)
    if validator.is_valid(value):
        assert check(annotation, value) == value
        return
    try:
        checked = check(annotation, value)
    except ArgumentError:
        return
    assert validator.is_valid(checked), f"{value!r} became {checked!r}, which is not {annotation}"


@given(ANNOTATIONS)
def test_every_schema_is_a_json_schema(annotation: str) -> None:
    jsonschema.Draft202012Validator.check_schema(read_type(annotation))
