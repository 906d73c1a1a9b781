"""A group in one call: each convention gets lists, and every return value is read sample by sample."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.errors import UserError
from rljob_plugins.openrlhf.returns import read_rewards
from rljob_service.worker.forms import results
from rljob_service.worker.forms.outcome import Outcome
from rljob_service.worker.load.loading import load
from rljob_service.worker.main import Executor
from rljob_service.worker.settings import FunctionSettings
from tests.support.plugins import REFERENCES

COMPLETIONS = ["4", "five", "6!"]
VERL = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    return "
TRL = "def reward(prompts, completions, **columns):\n    return "
OPENRLHF = "def reward_func(queries, prompts, labels):\n    return "
SCORER_CLASS = """
class LengthPenalty:
    def __init__(self, factor=0.5):
        self.factor = factor
        self.calls = 0

    async def compute_score(self, solution_str, ground_truth):
        self.calls += 1
        return {"score": float(solution_str == ground_truth), "calls": self.calls}

    def post_process_scores(self, group):
        mean = sum(len(sample["completion"]) for sample in group) / len(group)
        return [
            {"score": s["score"] - self.factor * (len(s["completion"]) > mean), "long": len(s["completion"]) > mean}
            for s in group
        ]
"""


def execute(source: str, request: dict[str, Any], scope: str = "group", **settings: Any) -> list[Outcome]:
    made = FunctionSettings(
        source,
        "function.py",
        None,
        "auto",
        settings.pop("kwargs", {}),
        2048,
        signatures=REFERENCES,
        scope=scope,
        **settings,
    )
    return Executor(load(made), made).execute(json.dumps(request).encode())


def group(completions: list[str] = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    samples = [
        {
            **{"id": f"s{i}", "prompt": "2+2?", "completion": completion, "ground_truth": "4"},
            **{"rendered": {"prompt": "2+2?", "query": f"2+2?{completion}"}, **fields},
        }
        for i, completion in enumerate(completions)
    ]
    return {"id": "g", "samples": samples}


def read_batch(value: Any, num_samples: int, returns: str = "score") -> list[Outcome]:
    return results.read_list(value, num_samples, results.reader_of(returns, "score"))


def scored(values: list[float]) -> list[Outcome]:
    return [Outcome(value, {}) for value in values]


@pytest.mark.parametrize(
    "source",
    [
        VERL + "[len(s) for s in solution_strs]",
        VERL + "[{'score': len(s)} for s in solution_strs]",
        VERL + "tuple((len(s), 'why') for s in solution_strs)",
        VERL + "__import__('numpy').array([len(s) for s in solution_strs])",
        TRL + "[len(c) for c in completions]",
        OPENRLHF + "[len(q) - len(p) for q, p in zip(queries, prompts)]",
        OPENRLHF + "{'rewards': __import__('numpy').array([len(q) - 4 for q in queries])}",
    ],
)
def test_each_convention_scores_a_whole_group_in_one_call(source: str) -> None:
    assert execute(source, group()) == scored([1.0, 4.0, 2.0])


def test_real_tensors_are_read_element_by_element() -> None:
    torch = pytest.importorskip("torch")
    rewards = torch.tensor([0.5, float("nan"), 1.0])
    logged = {"rewards": rewards, "extra_logs": {"length": torch.tensor([1, 2, 3]), "mean": torch.tensor(0.25)}}
    first, second, third = read_rewards(logged, 3)
    assert first == Outcome(0.5, {"length": 1.0, "mean": 0.25})
    assert (second.reason, second.components["length"]) == ("not_finite", 2.0)
    assert third.score == 1.0
    assert read_batch(torch.tensor([1.0, 2.0]), 2) == scored([1.0, 2.0])


def test_verl_batch_gets_its_four_lists() -> None:
    source = (
        f"{VERL}[float((data_sources, ground_truths, [each['k'] for each in extra_infos]) == "
        "(['d'] * 3, ['4'] * 3, [1] * 3))] * len(solution_strs)"
    )
    assert execute(source, group(data_source="d", extra_info={"k": 1})) == scored([1.0] * 3)


def test_trl_columns_have_one_element_per_sample_and_none_where_missing() -> None:
    request = group()
    for i, sample in enumerate(request["samples"]):
        sample["extra_info"] = {"level": i} if i else {}
    source = (
        "def reward(completions, level, answer, log_metric):\n"
        "    log_metric('known', sum(x is not None for x in level))\n"
        "    return level"
    )
    first, *others = execute(source, request)
    assert first.reason == "abstained"
    assert others == [Outcome(1.0, {"known": 2.0}), Outcome(2.0, {"known": 2.0})]


@pytest.mark.parametrize("head", [VERL, TRL, OPENRLHF])
@pytest.mark.parametrize(
    ("returned", "reason"),
    [("[1.0]", "bad_return"), ("1.0", "bad_return"), ("'abc'", "bad_return"), ("1/0", "exception")],
)
def test_return_value_of_another_length_fails_the_whole_group(head: str, returned: str, reason: str) -> None:
    (failure,) = execute(head + returned, group())
    assert (failure.score, failure.reason) == (None, reason)
    assert failure.message


@pytest.mark.parametrize("head", [VERL, TRL, OPENRLHF])
def test_element_that_is_not_a_finite_number_fails_only_its_sample(head: str) -> None:
    outcomes = execute(head + "[None, float('nan'), 'x', 0.0]", group([*COMPLETIONS, "z"]))
    assert [outcome.reason for outcome in outcomes] == ["abstained", "not_finite", "bad_return", None]
    assert outcomes[3].score == 0.0


@pytest.mark.parametrize("head", [VERL, TRL, OPENRLHF])
def test_element_that_raises_when_read_fails_only_its_sample(head: str) -> None:
    odd = "class Odd:\n    def __float__(self): raise KeyError('odd')\n"
    outcomes = execute(odd + head + "[Odd(), 1.0]", group(COMPLETIONS[:2]))
    assert [outcome.reason for outcome in outcomes] == ["bad_return", None]


ELEMENTS = st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.integers() | st.just({"score": 1})


@given(st.lists(ELEMENTS, min_size=1, max_size=5))
def test_score_is_the_finite_number_returned_for_that_sample(elements: list[Any]) -> None:
    for returns in ("score", "numbers"):
        outcomes = read_batch(elements, len(elements), returns)
        assert len(outcomes) == len(elements)
        for element, outcome in zip(elements, outcomes, strict=True):
            assert (outcome.score is None) == (outcome.reason is not None)
            if outcome.score is not None:
                assert math.isfinite(outcome.score)
                assert outcome.score == (element["score"] if isinstance(element, dict) else float(element))


def test_array_of_rows_is_not_a_list_of_numbers() -> None:
    assert [outcome.reason for outcome in read_batch(np.zeros((2, 3)), 2)] == ["bad_return"] * 2


def test_sample_is_a_batch_for_functions_that_take_lists() -> None:
    sample = group()["samples"][1]
    for source in (VERL + "[len(s) for s in solution_strs]", TRL + "[len(c) for c in completions]"):
        assert execute(source, sample, "sample") == scored([4.0])


def with_results(request: dict[str, Any], scores: list[float]) -> dict[str, Any]:
    results = [
        {"id": sample["id"], "valid": True, "score": score, "components": {"calls": 1.0}}
        for sample, score in zip(request["samples"], scores, strict=True)
    ]
    return request | {"results": results}


def test_one_instance_scores_samples_and_then_their_group() -> None:
    made = FunctionSettings(
        SCORER_CLASS, "f.py", None, "auto", {"factor": 0.25}, 2048, signatures=REFERENCES, scope="sampleThenGroup"
    )
    executor = Executor(load(made), made)
    request = group()
    individual = [executor.execute(json.dumps(sample).encode())[0] for sample in request["samples"]]
    assert [outcome.score for outcome in individual] == [1.0, 0.0, 0.0]
    assert individual[2].components == {"calls": 3.0}, "one instance saw all samples"
    together = executor.execute(json.dumps(with_results(request, [1.0, 0.0, 0.0])).encode())
    assert [outcome.score for outcome in together] == [1.0, -0.25, 0.0]
    assert together[1].components == {"calls": 1.0, "long": 1.0}, "components of both are kept"


def test_group_has_the_requests_with_their_individual_scores() -> None:
    source = """
class Check:
    def compute_score(self, solution_str): return 1
    def post_process_scores(self, group):
        assert list(group[0]) == [
            "prompt", "completion", "ground_truth", "data_source", "extra_info", "score", "components"
        ]
        return [sample["score"] + sample["components"]["calls"] for sample in group[:-1]] + [None]
"""
    outcomes = execute(source, with_results(group(), [5.0, 6.0, 7.0]), "sampleThenGroup")
    assert [outcome.score for outcome in outcomes] == [6.0, 7.0, None]
    assert outcomes[2].reason == "abstained"


@pytest.mark.parametrize(
    ("source", "scope", "kwargs", "expected"),
    [
        (
            SCORER_CLASS,
            "sample",
            {},
            "scores samples and groups; set scope: sampleThenGroup",
        ),
        (
            VERL + "1",
            "sampleThenGroup",
            {},
            "no class with compute_score and post_process_scores was found",
        ),
        ("class A: ...", "sampleThenGroup", {}, "it defines A"),
        (
            SCORER_CLASS,
            "sampleThenGroup",
            {"fctor": 1},
            "LengthPenalty(factor) does not accept fctor; remove it from function.kwargs",
        ),
        (
            SCORER_CLASS.replace("group):", "group, tool):"),
            "sampleThenGroup",
            {},
            "post_process_scores(group, tool) does not take only the group",
        ),
        (
            SCORER_CLASS.replace("solution_str,", "text,"),
            "sampleThenGroup",
            {},
            "LengthPenalty.compute_score(text, ground_truth) does not match",
        ),
        ("def compute_score(solution_str): return 1", "group", {}, "takes one sample, but scope: group passes lists"),
        (
            "def compute_score(x): return 1",
            "group",
            {},
            "function.columns: {PARAMETER: completion, OTHER: ground_truth}, or write",
        ),
    ],
)
def test_source_that_does_not_fit_its_scope_is_refused_at_startup(
    source: str, scope: str, kwargs: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        load(FunctionSettings(source, "function.py", None, "auto", kwargs, 2048, signatures=REFERENCES, scope=scope))
    assert expected in str(caught.value)
