"""The real server over HTTP with rewards that see a group: /v1/score-group is /v1/score for several samples at once."""

from __future__ import annotations

import http.client
import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rljob_api.wire.contract import ExitCode
from rljob_api.wire.scores import GroupResult, ScoreResult
from tests.paths import ROOT
from tests.support.reward_process import TOKEN, Server, build_group
from tests.support.waiting import DEADLINE_SECONDS, wait_for

StartServer = Callable[..., Server]

RELATIVE = """
import os, time
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    if "exit" in solution_strs:
        os._exit(3)
    if "hang" in solution_strs:
        time.sleep(1000)
    if "raise" in solution_strs:
        raise ValueError("no")
    longest = max(map(len, solution_strs))
    return [None if s == "none" else {"score": len(s) / longest, "length": len(s)} for s in solution_strs]
"""
LENGTH_PENALTY = (ROOT / "examples" / "length" / "reward.py").read_text()

# Creates a file `ran-...` when it runs, and continues when the file `go` exists.
SHARED_MEMORY = {"RLJOB_REWARD_DISABLE_ISOLATION": "private-shm"}
"""Besides its scratch directory, a function may write only to /dev/shm: here the test sees those files."""

GATED = """
import os, time
def reward(prompts, completions, answer):
    folder = answer[0]
    open(f"{folder}/ran-{os.getpid()}-{time.monotonic_ns()}", "w").close()
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.005)
    return [float(i) for i in range(len(completions))]
"""


def reasons(result: GroupResult) -> list[str | None]:
    return [r.reason and r.reason.value for r in result.results]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def relative(start_server: StartServer) -> Server:
    return start_server(RELATIVE, scope="group", slots=2, timeoutSeconds=1)


@pytest.fixture(scope="module")
def length_penalty(start_server: StartServer) -> Server:
    function = {"kwargs": {"penalty": 0.5}}
    return start_server(LENGTH_PENALTY, scope="sampleThenGroup", slots=2, cache=True, function=function)


def test_group_is_scored_in_one_call(relative: Server) -> None:
    first, second = relative.score_group(build_group("ab", "abcd")).results
    assert (first.score, second.score) == (0.5, 1.0)
    assert first.components == {"length": 2.0}
    assert first.version == relative.request("GET", "/v1/info")[1]["version"]
    assert first.execute_seconds == second.execute_seconds


def test_sample_without_a_score_is_invalid_and_each_sample_is_counted(relative: Server) -> None:
    name = 'rljob_reward_execute_seconds_count{lane="eval",outcome="%s",reward="test"}'
    before = {outcome: relative.metric(name % outcome) for outcome in ("valid", "abstained")}
    assert reasons(relative.score_group(build_group("none", "ab", "abcd", lane="eval"))) == ["abstained", None, None]
    counted = {outcome: relative.metric(name % outcome) - before[outcome] for outcome in before}
    assert counted == {"valid": 2, "abstained": 1}


@pytest.mark.parametrize(
    ("completion", "reason", "expected"),
    [
        ("raise", "exception", "ValueError: no"),
        ("exit", "worker_died", "exit code 3"),
        ("hang", "timeout", "longer than 1 s (timeoutSeconds)"),
    ],
)
def test_failure_of_the_group_is_the_reason_of_each_sample(
    relative: Server, completion: str, reason: str, expected: str
) -> None:
    result = relative.score_group(build_group("fine", completion, "fine"))
    assert reasons(result) == [reason] * 3
    assert all(expected in r.message for r in result.results), result
    assert reasons(relative.score_group(build_group("next"))) == [None], "the next group is served"


def test_retried_group_joins_the_running_one_and_is_remembered(start_server: StartServer, folder: Path) -> None:
    server = start_server(GATED, environment=SHARED_MEMORY, scope="group", slots=2)
    request = build_group("a", "b", name="same", ground_truth=str(folder))
    ran = lambda: len(list(folder.glob("ran-*")))  # noqa: E731
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(server.score_group, request)
        wait_for(lambda: ran() == 1, "the first attempt to run")
        second = threads.submit(server.score_group, request)
        other = post_in_thread(threads, server, "other", folder)
        (folder / "go").touch()
        assert first.result() == second.result()
        other()
    assert server.score_group(request) == first.result(), "remembered, times and all"
    assert ran() == 2, "one for each group"


def post_in_thread(threads: ThreadPoolExecutor, server: Server, name: str, folder: Path) -> Callable[[], GroupResult]:
    request = build_group("a", name=name, ground_truth=str(folder))
    return threads.submit(server.score_group, request).result


def test_group_takes_one_slot_and_is_refused_by_a_full_queue(start_server: StartServer, folder: Path) -> None:
    server = start_server(GATED, environment=SHARED_MEMORY, scope="group", slots=1, queueLength=1)
    with ThreadPoolExecutor(3) as threads:
        running = threads.submit(server.score_group, build_group("a", "b", "c", ground_truth=str(folder)))
        wait_for(lambda: server.metric('rljob_reward_slots_in_use{lane="train"') == 1, "the group to run")
        waiting = threads.submit(server.score_group, build_group("d", "e", ground_truth=str(folder)))
        wait_for(lambda: server.metric('rljob_reward_queue_length{lane="train"') == 1, "the second to wait")
        status, _, headers = server.request("POST", "/v1/score-group", build_group("f", ground_truth=str(folder)))
        assert (status, int(headers["retry-after"]) >= 1) == (429, True)
        (folder / "go").touch()
        assert [len(future.result().results) for future in (running, waiting)] == [3, 2]


def test_accepted_group_is_answered_before_the_server_exits(start_server: StartServer, folder: Path) -> None:
    server = start_server(GATED, environment=SHARED_MEMORY, scope="group", slots=1)
    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(server.score_group, build_group("a", "b", ground_truth=str(folder)))
        wait_for(lambda: list(folder.glob("ran-*")), "it to run")
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.request("GET", "/rljob/ready", token="none")[0] == 503, "the server to drain")
        assert server.request("POST", "/v1/score-group", build_group("c"))[0] == 503
        (folder / "go").touch()
        assert reasons(accepted.result()) == [None, None]
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.SUCCEEDED


@pytest.mark.parametrize(
    ("path", "request_", "expected"),
    [
        (
            "/v1/score",
            {"id": "1", "prompt": "p", "completion": "c"},
            "scope: group; POST whole groups to /v1/score-group",
        ),
        ("/v1/score-group", {"id": "1", "samples": []}, "samples: List should have at least 1 item"),
        ("/v1/score-group", {"id": "1", "samples": [{"id": "1"}]}, "samples.0.prompt: Field required"),
        (
            "/v1/score-group",
            build_group("a") | {"results": [{"id": "1", "valid": True, "score": 1.0}]},
            "results: must be null; with scope: group",
        ),
    ],
)
def test_invalid_group_request_is_refused_with_a_remedy(
    relative: Server, path: str, request_: dict[str, Any], expected: str
) -> None:
    status, answer, _ = relative.request("POST", path, request_)
    assert status == 422
    assert expected in answer["detail"]


def test_group_needs_the_token_and_a_post(relative: Server) -> None:
    assert relative.request("POST", "/v1/score-group", build_group("a"), token="wrong")[0] == 401
    connection = http.client.HTTPConnection(relative.host, 8080, timeout=DEADLINE_SECONDS)
    connection.request("GET", "/v1/score-group", headers={"Authorization": f"Bearer {TOKEN}"})
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())) == (405, {"detail": "POST a GroupRequest"})
    connection.close()


def test_class_scores_samples_and_then_their_group(length_penalty: Server) -> None:
    server = length_penalty
    info = server.request("GET", "/v1/info")[1]
    assert (info["scope"], info["signature"], info["entrypoint"]) == ("sampleThenGroup", "class", "LengthPenalty")
    completions = ["4", "it is 4", "3"]
    request = build_group(*completions)
    individual = [server.score(completion, ground_truth="4", id=f"{completion}") for completion in completions]
    assert [result["score"] for result in individual] == [1.0, 1.0, 0.0]
    status, answer, _ = server.request("POST", "/v1/score-group", request)
    assert status == 422
    assert "must be the result of each sample from /v1/score" in answer["detail"]
    results = server.score_group(request | {"results": individual}).results
    assert [result.score for result in results] == [1.0, 0.5, 0.0], "the longest right answer loses the penalty"
    assert [result.components for result in results] == [
        {"correct": 1.0, "length": 1.0, "longer": 0.0},
        {"correct": 1.0, "length": 7.0, "longer": 1.0},
        {"correct": 0.0, "length": 1.0, "longer": 0.0},
    ]


def test_group_step_refuses_invalid_results(length_penalty: Server) -> None:
    failed = ScoreResult(id="x", valid=False, reason="timeout").model_dump(mode="json")
    status, answer, _ = length_penalty.request("POST", "/v1/score-group", build_group("4") | {"results": [failed]})
    assert status == 422
    assert "one valid result per sample" in answer["detail"]
