"""episodesPerProcess: requests that share a process have their own results, and each failure costs what it must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rljob_api.wire.contract import ExitCode
from tests.process.rljob_service.server.test_episodes import EPISODES, build_call, send, send_and_leave
from tests.support.reward_process import Server
from tests.support.scripted_model import ScriptedModel
from tests.support.waiting import DEADLINE_SECONDS, wait_for

StartServer = Callable[..., Server]
NUM = 6
IN_USE = 'rljob_reward_slots_in_use{lane="train"'

REWARD = """
import asyncio, ctypes, os, tempfile, time

waiting, all_here = [], asyncio.Event()

async def meet():
    waiting.append(None)
    if len(waiting) == 6:
        all_here.set()
    await all_here.wait()

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    mode, _, value = solution_str.partition(" ")
    if mode in ("meet", "raise"):
        await meet()
    if mode == "raise":
        raise LookupError("of this one alone")
    if mode == "exit":
        os._exit(3)
    if mode == "crash":
        ctypes.string_at(0)
    if mode == "block":
        time.sleep(1000)
    if mode == "exhaust":
        len(bytearray(8 << 30))
    if mode == "child":
        await asyncio.gather(asyncio.sleep(1000), leave())
    if mode == "wait":
        await asyncio.sleep(1000)
    while mode in ("hang", "deaf"):
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            if mode == "hang":
                raise
    if mode == "file":
        tempfile.mkstemp()
    return {"score": float(value or 0), "pid": os.getpid(), "files": len(os.listdir())}

async def leave():
    raise SystemExit(3)
"""


@pytest.fixture(scope="module")
def reward(start_server: StartServer) -> Server:
    return start_server(REWARD, slots=8, episodesPerProcess=8, timeoutSeconds=3, function={"spareWorkers": 0})


def score_together(server: Server, *completions: str) -> list[Any]:
    with ThreadPoolExecutor(len(completions)) as pool:
        return list(pool.map(lambda each: server.score(each, ground_truth="", data_source=""), completions))


def test_requests_run_together_in_one_process_with_their_own_results(reward: Server) -> None:
    results = score_together(reward, *(f"meet {i}" for i in range(NUM - 1)), "raise")
    assert [result["score"] for result in results[:-1]] == [0.0, 1.0, 2.0, 3.0, 4.0], results
    assert len({result["components"]["pid"] for result in results[:-1]}) == 1
    assert (results[-1]["reason"], "LookupError: of this one alone" in results[-1]["message"]) == ("exception", True)


def test_timeout_of_one_cancels_it_alone(reward: Server) -> None:
    before = reward.score("return 1", ground_truth="")["components"]["pid"]
    results = score_together(reward, "hang", *["return 1"] * 3)
    assert [result["reason"] for result in results] == ["timeout", None, None, None]
    assert reward.score("return 1", ground_truth="")["components"]["pid"] == before, "the process was replaced"


@pytest.mark.parametrize(("mode", "message"), [("exit", "ended with exit code 3"), ("crash", "SIGSEGV")])
def test_what_ends_the_process_fails_and_its_neighbours_are_interrupted(
    reward: Server, mode: str, message: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(lambda: reward.score("wait", ground_truth=""))
        wait_for(lambda: reward.metric(IN_USE) == 1, "its start")
        result = reward.score(mode, ground_truth="")
        interrupted = neighbour.result()
    assert (result["valid"], result["reason"], message in result["message"]) == (False, "worker_died", True), result
    assert interrupted["reason"] == "interrupted", interrupted
    assert reward.score("return 1", ground_truth="")["valid"], "no other process has taken over"


@pytest.mark.parametrize("mode", ["deaf", "block"])
def test_request_that_cannot_be_cancelled_costs_its_process(reward: Server, mode: str) -> None:
    before = reward.score("return 1", ground_truth="")["components"]["pid"]
    assert reward.score(mode, ground_truth="")["reason"] == "timeout"
    assert reward.score("return 1", ground_truth="")["components"]["pid"] != before


def test_exhausted_memory_fails_one_and_replaces_the_process(reward: Server) -> None:
    before = reward.score("return 1", ground_truth="")["components"]["pid"]
    result = reward.score("exhaust", ground_truth="")
    assert (result["reason"], "MemoryError" in result["message"]) == ("worker_died", True), result
    assert reward.score("return 1", ground_truth="")["components"]["pid"] != before


def test_task_that_exits_fails_its_request_alone(reward: Server) -> None:
    before = reward.score("return 1", ground_truth="")["components"]["pid"]
    result = reward.score("child", ground_truth="")
    assert (result["reason"], "SystemExit" in result["message"]) == ("exception", True), result
    assert reward.score("return 1", ground_truth="")["components"]["pid"] == before


def test_files_are_removed_when_no_request_runs(reward: Server) -> None:
    assert reward.score("file 1", ground_truth="")["components"]["files"] == 1.0
    assert reward.score("return 1", ground_truth="")["components"]["files"] == 0.0


def test_blocked_loop_is_found_and_named(start_server: StartServer) -> None:
    server = start_server(REWARD, slots=8, episodesPerProcess=8, timeoutSeconds=60, function={"spareWorkers": 0})
    neighbour, blocked = score_together(server, "wait", "block")
    assert blocked["reason"] == "worker_died", blocked
    assert "blocked the event loop of its process for 10 s at function.inline:" in blocked["message"]
    assert neighbour["reason"] == "interrupted", neighbour
    assert blocked["id"] in neighbour["message"], "it does not name the cause"


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ("def compute_score(data_source, solution_str, ground_truth): return 1.0", [], "is not async"),
        ("def run(prompt): return 1.0", EPISODES, "is not async"),
        ("class Agent:\n  async def run(self): pass\n  async def setup(self): pass", EPISODES, "do their work in run"),
    ],
)
def test_function_that_cannot_share_is_refused(
    start_server: StartServer, source: str, arguments: list[str], message: str
) -> None:
    server = start_server(source, arguments, wait=False, episodesPerProcess=4)
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.USER
    log = server.log.read_text()
    assert "cannot share a process (episodesPerProcess is 4)" in log
    assert message in log


PROGRAM = """
import asyncio, os, pathlib

waiting, all_here = [], asyncio.Event()

async def run(messages, answer, mode, api_key, episode):
    from openai import AsyncOpenAI
    if mode == "hang":
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0)
            print(f"released {episode}", flush=True)
    waiting.append(None)
    if len(waiting) == 6:
        all_here.set()
    await all_here.wait()
    async with AsyncOpenAI() as client:  # of the variables
        reply = await client.chat.completions.create(model="policy", messages=messages)
    return {"reward": float(reply.choices[0].message.content), "info": {"pid": os.getpid(),
            "own": client.api_key == api_key == os.environ["OPENAI_API_KEY"]}}
"""


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    model = ScriptedModel()
    yield model
    model.close()


@pytest.fixture(scope="module")
def program(start_server: StartServer) -> Server:
    return start_server(
        PROGRAM, EPISODES, slots=8, episodesPerProcess=8, timeoutSeconds=30, function={"spareWorkers": 0}
    )


def play_together(server: Server, calls: list[dict[str, Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [result for _, result, _ in pool.map(lambda call: send(server, call), calls)]


def test_episodes_of_one_process_call_the_model_with_their_own_keys(program: Server, model: ScriptedModel) -> None:
    calls = [build_call(url=model.url, key=model.script([str(i)])) for i in range(NUM)]
    results = play_together(program, calls)
    assert all(result["valid"] for result in results), results
    assert [result["value"]["reward"] for result in results] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(result["value"]["info"]["own"] for result in results)
    assert len({result["value"]["info"]["pid"] for result in results}) == 1


def test_episode_whose_client_leaves_runs_its_finally(program: Server) -> None:
    call = build_call("hang")
    with send_and_leave(program, call):
        wait_for(lambda: program.metric(IN_USE) == 1, "the episode to run")
    wait_for(lambda: f"released {call['episode']}" in program.log.read_text(), "its finally block")


ENVIRONMENT = """
import asyncio
from openrlhf.utils.agent import AgentInstanceBase

waiting, all_here = [], asyncio.Event()

class AgentInstance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        self.turns = 0
        waiting.append(None)
        if len(waiting) == 6:
            all_here.set()
        await all_here.wait()
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        await asyncio.sleep(0)
        self.turns += 1
        return {"rewards": float(states["action_text"]), "environment_feedback": "next", "done": self.turns == 2}
"""


def test_environment_with_async_steps_plays_many_episodes_in_a_process(
    start_server: StartServer, model: ScriptedModel
) -> None:
    arguments = [*EPISODES, "--framework", "openrlhf"]
    server = start_server(ENVIRONMENT, arguments, slots=8, episodesPerProcess=8, function={"spareWorkers": 0})
    calls = [build_call(url=model.url, key=model.script([str(i), "0.5"])) for i in range(NUM)]
    results = play_together(server, calls)
    assert all(result["valid"] for result in results), results
    assert [sorted(result["value"]["rewards"].values()) for result in results] == [sorted([i, 0.5]) for i in range(NUM)]
