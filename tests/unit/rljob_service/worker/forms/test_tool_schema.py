"""What the model sees of a function."""

from __future__ import annotations

import enum
import functools
from typing import Annotated, Any, Literal

import pytest

from rljob_api.functions.forms import FormError
from rljob_service.worker.forms.tool_schema import describe_tool, read_docstring

Unit = Literal["C", "F"]


class Color(enum.Enum):
    RED = 1


def forecast(
    city: str,
    days: int = 1,
    unit: Unit = "C",
    hours: list[int] | None = None,
    *,
    exact: Annotated[bool, "Slow."] = False,
) -> str:
    """Return the weather.

    In all cities.

    Args:
        city (str): The name,
            in English.
        days: How many: at most 7.
        unknown: Not a parameter.

    Returns:
        A text.
    """
    return city


def test_schema_has_types_texts_defaults_and_what_is_required() -> None:
    assert describe_tool("forecast", forecast, {}) == {
        "name": "forecast",
        "description": "Return the weather.\n\nIn all cities.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The name, in English."},
                "days": {"type": "integer", "description": "How many: at most 7.", "default": 1},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "hours": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
                "exact": {"type": "boolean", "description": "Slow.", "default": False},
            },
            "required": ["city"],
        },
    }


def test_parameters_with_a_value_are_hidden() -> None:
    schema = describe_tool("forecast", forecast, {"city": "Rome", "hours": [1]})
    assert list(schema["parameters"]["properties"]) == ["days", "unit", "exact"]
    assert schema["parameters"]["required"] == []


def test_decorated_function_keeps_its_schema() -> None:
    @functools.wraps(forecast)
    def wrapper(*args: Any, **kwargs: Any) -> str:
        return forecast(*args, **kwargs)

    assert describe_tool("forecast", wrapper, {}) == describe_tool("forecast", forecast, {})
    partial = describe_tool("forecast", functools.partial(forecast, days=3), {})
    assert partial["parameters"]["properties"]["days"]["default"] == 3


def test_default_that_json_does_not_have_is_left_out() -> None:
    def search(text: str, options: dict = {1: 2}) -> None: ...  # type: ignore[type-arg]  # noqa: B006

    assert describe_tool("search", search, {})["parameters"]["properties"]["options"] == {"type": "object"}


def test_types_that_cannot_be_resolved_are_reported() -> None:
    def search(text: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(FormError, match="its types cannot be resolved: NameError: name 'Missing'"):
        describe_tool("search", search, {})


@pytest.mark.parametrize(
    ("docstring", "description", "texts"),
    [
        ("", "", {}),
        ("One line.", "One line.", {}),
        ("Text.\n\nArgs:\n    a: First.\n    b (dict[str, int], optional): B.", "Text.", {"a": "First.", "b": "B."}),
        ("Args:\n    a: First,\n        then: more.\n\n    b:\n        B.", "", {"a": "First, then: more.", "b": "B."}),
        ("Text.\n\nReturns:\n    x: no parameter.\n\nArguments:\n    *a: First.", "Text.", {"a": "First."}),
        ("Use the Args: section.", "Use the Args: section.", {}),
        ("Text.\n\nRaises:\n    ValueError: If wrong.", "Text.", {}),
    ],
)  # fmt: skip
def test_google_docstrings_are_read(docstring: str, description: str, texts: dict[str, str]) -> None:
    assert read_docstring(docstring) == (description, texts)
