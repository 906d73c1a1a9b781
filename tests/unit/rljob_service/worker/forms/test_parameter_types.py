"""Records and members of an Enum as parameters of tools: their schemas, and the values that a function gets."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict

import jsonschema
import pytest

from rljob_api.functions.annotations import UnsupportedTypeError, schema_of
from rljob_service.worker.forms.arguments import ArgumentError, check_arguments
from rljob_service.worker.forms.parameter_types import Classes, build
from tests.support.agent_functions import call_tool, load_tools


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Odd(enum.Enum):
    PAIR = (1, 2)


class Place(TypedDict):
    city: str
    street: NotRequired[str]


@dataclass
class Stop:
    place: Place
    color: Color = Color.RED
    days: int = 1
    notes: list[str] = field(default_factory=list)
    hidden: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.days > 7:
            raise ValueError("at most 7 days")


@dataclass
class Tree:
    children: list[Tree]


@dataclass
class Blob:
    data: bytes


PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "street": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
COLOR = {"type": "string", "enum": ["red", "blue"]}
STOP = {
    "type": "object",
    "properties": {
        "place": PLACE,
        "color": COLOR,
        "days": {"type": "integer"},
        "notes": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["place"],
    "additionalProperties": False,
}


def schema_for(annotation: Any) -> dict[str, Any]:
    classes = Classes()
    return schema_of(classes.show(annotation), classes.schemas)


def read(annotation: Any, value: Any) -> Any:
    parameters = {"type": "object", "properties": {"x": schema_for(annotation)}, "required": ["x"]}
    return build(annotation, check_arguments("f", parameters, {"x": value})["x"], "x")


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (Color, COLOR),
        (Level, {"type": "integer", "enum": [1, 2]}),
        (Place, PLACE),
        (Stop, STOP),
        (list[Stop], {"type": "array", "items": STOP}),
        (dict[str, Color], {"type": "object", "additionalProperties": COLOR}),
        (Optional[Color], {"anyOf": [COLOR, {"type": "null"}]}),  # noqa: UP045
        (Annotated[Color, "Of the car."], COLOR | {"description": "Of the car."}),
        (Place | list[Place], {"anyOf": [PLACE, {"type": "array", "items": PLACE}]}),
    ],
)
def test_class_has_a_schema(annotation: Any, schema: dict[str, Any]) -> None:
    assert schema_for(annotation) == schema
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (Color, "blue", Color.BLUE),
        (Level, "2", Level.HIGH),
        (Color | None, None, None),
        (Color | None, "red", Color.RED),
        (list[Color], '["red", "blue"]', [Color.RED, Color.BLUE]),
        (dict[str, Level], {"a": 1}, {"a": Level.LOW}),
        (Place, {"city": "Rome"}, {"city": "Rome"}),
        (Place, '{"city": 7}', {"city": "7"}),
        (Stop, {"place": {"city": "Rome"}, "days": "3"}, Stop({"city": "Rome"}, days=3)),
        (list[Stop | Color], ["red", {"place": {"city": "x"}}], [Color.RED, Stop({"city": "x"})]),
        (Annotated[Color, "Text."], "red", Color.RED),
        (Literal["a"], "a", "a"),
        (Any, {"a": 1}, {"a": 1}),
        (list, [1, {}], [1, {}]),
    ],
)
def test_function_gets_what_its_type_says(annotation: Any, value: Any, expected: Any) -> None:
    found = read(annotation, value)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (Color, "green", 'x must be one of "red", "blue", got "green"'),
        (Place, {}, "x must be an object {city: string, street?: string}, got {}"),
        (Place, {"city": "a", "zip": 1}, "x must be an object {city: string, street?: string}, got"),
        (list[Stop], [{"place": {"city": None}}], "x[0].place.city must be a string, got null"),
        (Stop, {"place": {"city": "a"}, "days": 8}, "x is not a Stop: at most 7 days"),
    ],
)
def test_wrong_value_is_refused_with_what_is_expected(annotation: Any, value: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        read(annotation, value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (Odd, "Odd (its values are not str, int, float or bool)"),
        (Tree, "Tree (its field children is Tree (it contains itself))"),
        (list[Blob], "Blob (its field data is bytes)"),
    ],
)
def test_class_without_a_schema_is_named_with_the_reason(annotation: Any, message: str) -> None:
    with pytest.raises(UnsupportedTypeError) as caught:
        schema_for(annotation)
    assert caught.value.annotation == message


def test_classes_of_one_name_are_kept_apart() -> None:
    first, second = enum.Enum("Kind", {"A": "a"}), enum.Enum("Kind", {"B": "b"})
    assert schema_for(first | second) == {
        "anyOf": [{"type": "string", "enum": ["a"]}, {"type": "string", "enum": ["b"]}]
    }


SOURCE = """
from __future__ import annotations
import enum
from dataclasses import dataclass
from typing import TypedDict

class Unit(enum.Enum):
    METRIC = "metric"
    US = "us"

class Point(TypedDict, total=False):
    x: int

@dataclass
class Route:
    points: list[Point]
    unit: Unit = Unit.METRIC

def plan(route: Route, unit: Unit = Unit.US, start: Point | None = None) -> str:
    return f"{type(route).__name__} {route.points} {route.unit.name} {unit.name} {start}"
"""


def test_tool_with_classes_is_described_and_called() -> None:
    [schema] = load_tools(SOURCE).tools
    properties = schema["parameters"]["properties"]
    assert properties["unit"] == {"type": "string", "enum": ["metric", "us"], "default": "us"}
    assert schema["parameters"]["required"] == ["route"]
    json.dumps(schema)
    arguments = {"route": {"points": [{"x": "1"}, {}], "unit": "us"}, "start": {"x": 2}}
    assert call_tool(SOURCE, "plan", arguments).value == "Route [{'x': 1}, {}] US US {'x': 2}"
    assert "route must be an object {points: array" in call_tool(SOURCE, "plan", {"route": {}}).message


def test_class_without_a_schema_is_hidden_by_its_value() -> None:
    source = "class Odd:\n    pass\n\ndef f(a: str, odd: Odd = None): return a"
    assert [schema["name"] for schema in load_tools(source, kwargs={"odd": 1}).tools] == ["f"]


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "int"),
        (None, "None"),
        (type(None), "NoneType"),
        (Any, "Any"),
        (list[dict[str, int]], "list[dict[str, int]]"),
        (Optional[int], "int | NoneType"),  # noqa: UP045
        (int | None, "int | NoneType"),
        (Literal["C", "F"], "Literal['C', 'F']"),
        (Annotated[int, "Text", Color.RED], "Annotated[int, 'Text', None]"),
        (Color, "Color"),
        (Literal[Color.RED], "Literal[<Color.RED: 'red'>]"),
    ],
)
def test_type_as_text(annotation: Any, text: str) -> None:
    assert Classes().show(annotation) == text
