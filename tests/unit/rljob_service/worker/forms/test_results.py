"""Reading records that functions return."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import pydantic
import pytest

from rljob_service.worker.forms.outcome import Outcome
from rljob_service.worker.forms.results import read_list, read_value, reader_of


class Model(pydantic.BaseModel):
    acc: float
    score: float


@dataclasses.dataclass
class Record:
    acc: float
    score: float
    why: str = "because"


Tuple = namedtuple("Tuple", "acc score")


@pytest.mark.parametrize("made", [Model, Record, Tuple])
def test_record_is_read_by_name(made: Any) -> None:
    assert read_value(made(acc=0.0, score=1.0)) == Outcome(1.0, {"acc": 0.0})


def test_record_without_the_score_is_invalid_and_not_its_first_field() -> None:
    for returned in (namedtuple("Pair", "acc why")(0, "x"), dataclasses.make_dataclass("Own", ["acc"])(0)):
        outcome = read_value(returned)
        assert (outcome.score, outcome.reason) == (None, "bad_return")
        assert 'without "score" (its keys: acc' in outcome.message


def test_record_is_not_a_list_of_scores() -> None:
    [outcome] = read_list(Tuple(0.0, 1.0), 2, reader_of("numbers", ""))
    assert outcome.reason == "bad_return"


def test_class_is_not_a_record() -> None:
    assert read_value(Record).reason == "bad_return"


@pytest.mark.parametrize(
    ("returns", "value", "expected"),
    [
        ("score", {"overall": 0.5, "format": 1}, Outcome(0.5, {"format": 1.0})),
        ("score", {"overall": 0.5, "score": 9}, Outcome(0.5, {"score": 9.0})),
        ("numbers", 0.25, Outcome(0.25, {})),
    ],
)
def test_each_kind_of_result_has_its_key(returns: str, value: Any, expected: Outcome) -> None:
    assert reader_of(returns, "overall")(value) == expected
