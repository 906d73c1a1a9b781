"""Which paths each kind of service serves, and which requests it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.calls import CallRequest
from rljob_api.wire.contract import UrlPath
from rljob_api.wire.scores import GroupRequest, ScoreRequest, ScoreResult
from rljob_service.kinds import ENDPOINTS, KINDS
from rljob_service.worker.settings import SERVES

SCORE, GROUP, CALL = (path.encode() for path in (UrlPath.SCORE, UrlPath.SCORE_GROUP, UrlPath.CALL))
FUNCTION = {"inline": "x = 1"}
CALLS = CallService.model_validate({"name": "user", "function": FUNCTION})


def reward(scope: str, **fields: Any) -> Reward:
    return Reward.model_validate({"name": "r", "function": FUNCTION, "scope": scope, **fields})


def test_workers_know_the_same_kinds() -> None:
    assert tuple(KINDS) == SERVES


@pytest.mark.parametrize(
    ("scope", "served"), [("sample", [SCORE]), ("group", [GROUP]), ("sampleThenGroup", [SCORE, GROUP])]
)
def test_a_reward_serves_the_paths_of_its_scope(scope: str, served: list[bytes]) -> None:
    assert [path for path in ENDPOINTS if not KINDS["score"].refuse_path(path, reward(scope))] == served


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (SCORE, "this reward has scope: group; POST whole groups to /v1/score-group, or set scope: sample"),
        (CALL, "this reward has scope: group; POST samples to /v1/score"),
    ],
)
def test_a_reward_names_the_path_that_it_serves(path: bytes, expected: str) -> None:
    assert KINDS["score"].refuse_path(path, reward("group")) == expected


@pytest.mark.parametrize("kind", ["user", "tools", "episodes"])
def test_others_serve_calls_alone(kind: str) -> None:
    assert [path for path in ENDPOINTS if not KINDS[kind].refuse_path(path, CALLS)] == [CALL]
    assert KINDS[kind].refuse_path(SCORE, CALLS) == f"this server serves {kind}; POST each call to /v1/call"


def test_a_group_may_be_three_times_as_long_as_a_sample_up_to_a_limit() -> None:
    sizes = [
        [ENDPOINTS[path].max_body_bytes(reward("group", maxRequestSize=f"{size}Mi")) >> 20 for size in (16, 30)]
        for path in (SCORE, GROUP)
    ]
    assert sizes == [[16, 30], [48, 60]]


def test_a_group_has_individual_results_exactly_with_sample_then_group() -> None:
    sample, result = ScoreRequest(id="a", prompt="p", completion="c"), ScoreResult(id="a", valid=True, score=1.0)
    without, with_results = (GroupRequest(id="g", samples=[sample], results=each) for each in (None, [result]))
    find = KINDS["score"].find_problem
    assert (find(without, reward("group")), find(with_results, reward("sampleThenGroup"))) == ("", "")
    assert find(with_results, reward("group")).startswith("results: must be null")
    assert find(without, reward("sampleThenGroup")).startswith("results: must be the result of each sample")


def find_problem(kind: str, arguments: dict[str, Any]) -> str:
    return KINDS[kind].find_problem(CallRequest(id="c", arguments=arguments), CALLS)


def test_arguments_of_a_user_are_the_fields_of_a_user_call() -> None:
    good = {"messages": [{"role": "assistant", "content": "4"}], "prompt": "2+2?"}
    assert find_problem("user", good) == ""
    assert find_problem("user", {"messages": []}) == "arguments: prompt: Field required"
    assert "arguments: state: Input should be a valid dict" in find_problem("user", good | {"state": []})
    assert "arguments: tries: Extra inputs" in find_problem("user", good | {"tries": 1})
    assert "arguments: episode: Field required" in find_problem("episodes", good)
    assert find_problem("tools", {"anything": 1}) == "", "its function decides"
