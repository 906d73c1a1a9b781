"""`cache: true` over HTTP: equal samples are scored once, in any lane and under any id; failures are retried."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.reward_process import Server
from tests.support.waiting import wait_for

StartServer = Callable[..., Server]

COUNTING = """
import os, time
calls = 0
def compute_score(solution_str, ground_truth):
    global calls
    calls += 1
    if solution_str == "wait":
        open(f"{ground_truth}/running", "w").close()
        while not os.path.exists(f"{ground_truth}/go"):
            time.sleep(0.005)
    if solution_str == "fail":
        raise ValueError(calls)
    return {"score": calls, "half": 0.5}
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        Path(path).chmod(0o777)  # for the worker's user
        yield Path(path)


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Server:
    disabled = {"RLJOB_REWARD_DISABLE_ISOLATION": "private-shm"}  # the tests use files in /dev/shm
    return start_server(COUNTING, environment=disabled, slots=4, cache=True)


def counted(server: Server, outcome: str) -> float:
    return server.metric(f'rljob_reward_cache_total{{outcome="{outcome}"')


def test_equal_request_gets_the_cached_result_under_its_own_id(server: Server) -> None:
    first = server.score("a", id="1")
    second = server.score("a", id="2", lane="eval")
    assert (second["score"], second["components"]) == (first["score"], {"half": 0.5})
    assert (first["id"], second["id"]) == ("1", "2")
    assert second["execute_seconds"] == 0.0
    assert server.score("a", extra_info={"index": 7})["score"] > first["score"], "another sample"
    assert (counted(server, "hit"), counted(server, "miss")) == (1, 2)


def test_failed_result_is_not_cached(server: Server) -> None:
    messages = [server.score("fail")["message"] for _ in range(2)]
    assert messages[0] != messages[1]


def test_equal_request_joins_the_running_one(server: Server, folder: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(server.score, "wait", id="1", ground_truth=str(folder))
        wait_for((folder / "running").exists, "the first to run")
        others = [
            threads.submit(server.score, "wait", id=name, ground_truth=str(folder), lane=lane)
            for name, lane in (("2", "train"), ("3", "eval"))
        ]
        wait_for(lambda: counted(server, "joined") == 2, "both to join")
        (folder / "go").touch()
        results = [future.result() for future in (first, *others)]
    assert [result["id"] for result in results] == ["1", "2", "3"]
    assert len({result["score"] for result in results}) == 1
