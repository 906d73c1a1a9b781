"""Servers of simulated users and tools over HTTP: each failure costs its call and nothing else."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rljob_api.wire.calls import ToolSchema
from rljob_api.wire.contract import MAX_TOOL_RESULT_CHARACTERS, ExitCode
from tests.support.reward_process import Server
from tests.support.waiting import DEADLINE_SECONDS, wait_for

StartServer = Callable[..., Server]
MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "3"}]

TOOLS = r'''
import ctypes, os, struct, sys, time

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

async def later(text: str) -> dict:
    return {"text": text, "pid": os.getpid()}

def hang(): time.sleep(1000)
def spin():
    while True:
        pass
def fail(): raise LookupError("no such city")
def end(): os._exit(3)
def crash(): ctypes.string_at(0)
def leave(): sys.exit(3)
def exhaust(): return len(bytearray(8 << 30))
def large(): return "ä" * (50 << 20)
def nested():
    value = []
    for _ in range(100_000):
        value = [value]
    return value
def odd(): return {"a": {1}, "b": float("nan"), "c": "\ud83d"}
def flood():
    for _ in range(100):
        print("\x00\xff" * 5000)
    os.write(1, b'[{"value": "x"}]' * 1000)
    return "printed"
def forge(answer: str):
    # For each request that this process may have: their numbers begin at 1.
    frame = b"".join(struct.pack(">II", len(answer), number) + answer.encode() for number in range(1, 100))
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, frame)
        except OSError:
            pass
    time.sleep(1000)
def write():
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\x00\x00\x00\x05\x00\x00\x00\x01hello")
        except OSError:
            pass
    return "wrote"
'''


@pytest.fixture(scope="module")
def tools(start_server: StartServer) -> Server:
    return start_server(TOOLS, ["--serves", "tools"], slots=2)


def test_info_lists_the_tools(tools: Server) -> None:
    status, info, _ = tools.request("GET", "/v1/info")
    schemas = [ToolSchema.model_validate(schema) for schema in info["tools"]]
    assert (status, info["signature"], schemas[0].name, schemas[0].description) == (
        200,
        "tools",
        "add",
        "Add two numbers.",
    )
    assert schemas[0].parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "integer", "description": "The second.", "default": 1},
        },
        "required": ["a"],
    }
    assert {"later", "hang", "fail"} < {schema.name for schema in schemas}


def test_tool_is_called_with_checked_arguments(tools: Server) -> None:
    result = tools.call({"a": 2, "b": "3"}, "add")
    assert (result["valid"], result["value"], result["reason"]) == (True, "5", None)
    assert len(result["version"]) == 64
    assert tools.call({"a": 2}, "add", lane="eval")["value"] == "3"
    assert '"text": "ä"' in tools.call({"text": "ä"}, "later")["value"]
    assert tools.metric('rljob_reward_execute_seconds_count{lane="eval",outcome="valid"') >= 1


@pytest.mark.parametrize(
    ("function", "arguments", "reason", "message"),
    [
        ("fail", {}, "exception", r"function.inline:\d+: LookupError: no such city"),
        ("leave", {}, "exception", "SystemExit: 3"),
        ("exhaust", {}, "exception", "MemoryError"),
        ("end", {}, "worker_died", "ended with exit code 3"),
        ("crash", {}, "worker_died", "SIGSEGV"),
        ("ad", {}, "bad_request", "unknown function ad. Did you mean add?"),
        ("add", {}, "bad_request", "missing argument a"),
        ("add", {"a": "two"}, "bad_request", 'a must be an integer, got "two"'),
    ],
)
def test_failed_call_costs_itself_alone(
    tools: Server, function: str, arguments: dict[str, Any], reason: str, message: str
) -> None:
    result = tools.call(arguments, function)
    assert (result["valid"], result["value"], result["reason"]) == (False, None, reason), result
    assert re.search(message, result["message"]), result
    assert tools.call({"a": 1}, "add")["value"] == "2"


def test_call_that_takes_too_long_costs_itself_alone(start_server: StartServer) -> None:
    server = start_server(TOOLS, ["--serves", "tools"], slots=2, timeoutSeconds=1)
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda name: server.call({}, name), ("hang", "spin")))
    assert [(result["valid"], result["reason"]) for result in results] == [(False, "timeout")] * 2
    assert "the function ran longer than 1 s (timeoutSeconds) and was killed" in results[0]["message"]
    assert wait_for(lambda: server.call({"a": 1}, "add")["value"] == "2", "another call to be served")


@pytest.mark.parametrize(
    ("function", "value"),
    [
        ("large", "ä" * MAX_TOOL_RESULT_CHARACTERS),
        ("odd", '{"a": [1], "b": NaN, "c": "?"}'),
        ("flood", "printed"),
    ],
)
def test_odd_result_is_text_of_a_bounded_length(tools: Server, function: str, value: str) -> None:
    result = tools.call({}, function)
    assert result["value"] == value, result["message"]
    assert tools.call({"a": 1}, "add")["value"] == "2"


def test_result_that_cannot_be_json_is_text_or_invalid(tools: Server) -> None:
    result = tools.call({}, "nested")
    assert (result["valid"], result["reason"]) in ((True, None), (False, "exception")), result
    assert tools.call({"a": 1}, "add")["value"] == "2"


def test_function_that_writes_to_the_pipe_of_its_worker_costs_its_call(tools: Server) -> None:
    result = tools.call({}, "write")
    assert (result["valid"], result["reason"]) in ((False, "worker_died"), (True, None)), result
    assert tools.call({"a": 1}, "add")["value"] == "2"


@pytest.mark.parametrize(
    "answer",
    [
        '[{"value": 3, "reason": null, "message": ""}]',
        '[{"value": null, "reason": null, "message": ""}]',
        '[{"value": "x", "reason": "exception", "message": ""}]',
        '[{"score": 1.0, "components": {}, "reason": null, "message": ""}]',
        '{"tools": []}',
    ],
)
def test_forged_answer_of_another_form_costs_its_call(tools: Server, answer: str) -> None:
    result = tools.call({"answer": answer}, "forge")
    assert (result["valid"], result["reason"]) == (False, "worker_died"), result
    assert "wrote garbage to its pipe" in result["message"]
    assert tools.call({"a": 1}, "add")["value"] == "2"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "detail"),
    [
        ("POST", "/v1/call", b"{", 422, "Invalid JSON"),
        ("POST", "/v1/call", {"id": "a"}, 422, "arguments: Field required"),
        (
            "POST",
            "/v1/call",
            {"id": "a", "function": "add", "arguments": [1]},
            422,
            "arguments: Input should be an object",
        ),
        ("POST", "/v1/call", {"id": "a", "arguments": {}, "extra": 1}, 422, "Extra inputs"),
        ("POST", "/v1/score", {}, 422, "this server serves tools; POST each call to /v1/call"),
        ("GET", "/v1/call", None, 405, "POST a CallRequest"),
    ],
)
def test_malformed_request_is_refused(
    tools: Server, method: str, path: str, body: Any, status: int, detail: str
) -> None:
    found, answer, _ = tools.request(method, path, body)
    assert found == status
    assert detail in answer["detail"]


def test_call_needs_the_token(tools: Server) -> None:
    request = {"id": "a", "function": "add", "arguments": {"a": 1}}
    assert tools.request("POST", "/v1/call", request, token="wrong")[0] == 401


def test_arguments_that_cannot_be_read_are_an_invalid_result(tools: Server) -> None:
    result = tools.call({"a": "\ud83d"}, "add")
    assert (result["valid"], result["reason"]) == (False, "bad_request")


def test_server_of_rewards_refuses_calls(start_server: StartServer) -> None:
    server = start_server("def reward(completions): return [1.0]")
    status, answer, _ = server.request("POST", "/v1/call", {"id": "a", "arguments": {}})
    assert (status, answer["detail"]) == (422, "this reward has scope: sample; POST samples to /v1/score")
    assert "tools" not in server.request("GET", "/v1/info")[1]


GATED = """
import os, time
def wait(name: str) -> str:
    open(f"FOLDER/ran-{name}", "a").write("x")
    while not os.path.exists(f"FOLDER/go-{name}"):
        time.sleep(0.005)
    return name
"""

SHARED_MEMORY = {"RLJOB_REWARD_DISABLE_ISOLATION": "private-shm"}


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """Shared memory: besides its scratch directory, a function may write only there."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder).chmod(0o777)  # for the worker's user
        yield Path(folder)


def test_full_queue_refuses_and_a_retry_joins_the_running_call(start_server: StartServer, shared_folder: Path) -> None:
    source = GATED.replace("FOLDER", str(shared_folder))
    server = start_server(source, ["--serves", "tools"], environment=SHARED_MEMORY, slots=1, queueLength=1)

    def send(name: str) -> tuple[int, Any, dict[str, str]]:
        return server.request("POST", "/v1/call", {"id": name, "function": "wait", "arguments": {"name": name}})

    with ThreadPoolExecutor(4) as threads:
        running = threads.submit(send, "a")
        wait_for((shared_folder / "ran-a").exists, "the first call to run")
        retried = threads.submit(send, "a")
        waiting = threads.submit(send, "b")
        wait_for(lambda: server.metric('rljob_reward_queue_length{lane="train"') == 1, "the second call to wait")
        status, answer, headers = send("c")
        assert (status, int(headers["retry-after"]) >= 1) == (429, True)
        assert "the queue is full" in answer["detail"]
        for name in "ab":
            (shared_folder / f"go-{name}").touch()
        assert [call.result()[1]["value"] for call in (running, retried, waiting)] == ["a", "a", "b"]
    assert send("a")[1]["value"] == "a", "a retry after the response gets the same one"
    assert (shared_folder / "ran-a").read_text() == "x"


def test_draining_server_finishes_its_calls(start_server: StartServer, shared_folder: Path) -> None:
    source = GATED.replace("FOLDER", str(shared_folder))
    server = start_server(source, ["--serves", "tools"], environment=SHARED_MEMORY, slots=1)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(server.call, {"name": "a"}, "wait")
        wait_for((shared_folder / "ran-a").exists, "the call to run")
        server.process.send_signal(signal.SIGTERM)
        threading.Timer(0.2, (shared_folder / "go-a").touch).start()
        assert call.result()["value"] == "a"
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.SUCCEEDED


USER = """
import os, time
def respond(messages, state, answer, turn, behaviour="count"):
    state["tries"] = state.get("tries", 0) + 1
    last = messages[-1]["content"]
    if last == "hang":
        time.sleep(1000)
    if last == "exit":
        os._exit(3)
    if last == "large":
        return "x" * (2 << 20)
    if last == "wrong":
        return 3
    if last == answer:
        return None, 1.0, {"tries": state["tries"], "turn": turn}
    return f"Not {last}.", -0.1, {"set": {1}}
"""


@pytest.fixture(scope="module")
def user(start_server: StartServer) -> Server:
    return start_server(USER, ["--serves", "user"], slots=2, timeoutSeconds=1)


def build_call(answer: str, **fields: Any) -> dict[str, Any]:
    messages = [MESSAGES[0], {"role": "assistant", "content": answer}]
    return {"messages": messages, "prompt": MESSAGES[:1], "ground_truth": "4", **fields}


def test_user_replies_with_the_state_that_travels(user: Server) -> None:
    first = user.call(build_call("3"))
    assert first["value"] == {"text": "Not 3.", "reward": -0.1, "state": {"tries": 1}, "info": {"set": "{1}"}}
    last = user.call(build_call("4", state=first["value"]["state"], turn=1))
    assert last["value"] == {"text": None, "reward": 1.0, "state": {"tries": 2}, "info": {"tries": 2, "turn": 1}}


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        ("hang", "timeout", "ran longer than 1 s"),
        ("exit", "worker_died", "exit code 3"),
        ("large", "bad_return", "the reply has 2048 KiB"),
        ("wrong", "bad_return", "respond returned int 3; expected (text or None"),
    ],
)
def test_failed_turn_of_a_user_costs_itself_alone(user: Server, answer: str, reason: str, message: str) -> None:
    result = user.call(build_call(answer))
    assert (result["valid"], result["reason"]) == (False, reason)
    assert message in result["message"]
    assert user.call(build_call("3"))["valid"]


def test_call_that_is_not_a_user_call_is_refused(user: Server) -> None:
    status, answer, _ = user.request("POST", "/v1/call", {"id": "a", "arguments": {"messages": []}})
    assert (status, answer["detail"]) == (422, "arguments: prompt: Field required")
    status, answer, _ = user.request("POST", "/v1/score", {"id": "a"})
    assert (status, answer["detail"]) == (422, "this server serves user; POST each call to /v1/call")


@pytest.mark.parametrize(
    ("source", "serves", "message"),
    [
        ("def reply(messages): ...", "user", "function.inline:1: neither respond nor a class"),
        ("def f(x): ...", "tools", "function.inline:1: f(x): the parameter x has no type"),
        ("import no_such_package", "tools", "function.requirements"),
    ],
)
def test_source_that_cannot_be_served_ends_the_program(
    start_server: StartServer, source: str, serves: str, message: str
) -> None:
    server = start_server(source, ["--serves", serves, "--check"], wait=False)
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.USER
    assert message in server.log.read_text()


def test_check_shows_what_is_served(start_server: StartServer) -> None:
    server = start_server(TOOLS, ["--serves", "tools", "--check"], wait=False)
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.SUCCEEDED
    assert "test: add, later, hang" in server.log.read_text()
