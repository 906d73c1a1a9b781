"""What user code returned, as JSON and as text."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_service.worker.forms.json_values import NotJsonError, to_json, to_log, to_text

CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@dataclasses.dataclass
class Point:
    x: int


@given(JSON)
def test_json_is_kept(value: Any) -> None:
    assert to_json(value, "state") == to_log(value) == value
    assert json.loads(to_text([value], 10**6)) == [value]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [{1}]}, "state['a'][0] is a set"),
        ({1: 2}, "state has the key int 1; keys must be str"),
        ({"a": float("nan")}, "state['a'] is nan"),
        ({"a": object()}, "is a object"),
        ({"a": np.zeros(2)}, "is a ndarray"),
    ],
)
def test_value_that_would_not_return_equal_is_named(value: Any, message: str) -> None:
    with pytest.raises(NotJsonError) as caught:
        to_json(value, "state")
    assert message in str(caught.value)
    json.dumps(to_log(value), allow_nan=False)


def test_scalars_and_tuples_and_surrogates_become_json() -> None:
    assert to_json({"a": np.int64(3), "b": (1, np.float32(0.5)), "c": "\ud83d"}, "state") == {
        "a": 3,
        "b": [1, 0.5],
        "c": "?",
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("as it is\n", "as it is\n"),
        ("\ud83d", "?"),
        (3, "3"),
        (None, "null"),
        (True, "true"),
        ({"ä": [1, None]}, '{"ä": [1, null]}'),
        (Point(1), '{"x": 1}'),
        ({"points": [Point(1)], "at": np.array([1, 2])}, '{"points": [{"x": 1}], "at": [1, 2]}'),
        ({1}, "[1]"),
        (float("inf"), "Infinity"),
        ({"a": b"x"}, '{"a": "b\'x\'"}'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (CIRCLE, "[[...]]"),
    ],
)
def test_result_of_a_tool_is_text(value: Any, expected: str) -> None:
    assert to_text(value, 1000) == expected


def test_long_result_is_cut_off() -> None:
    assert to_text("x" * 100, 10) == "x" * 10
    assert to_text(["x" * 100], 10) == '["xxxxxxxx'
