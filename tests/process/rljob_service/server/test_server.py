"""The real server over HTTP: each failure of a function costs one invalid result and nothing else."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from rljob_api.wire.contract import ExitCode
from rljob_api.wire.scores import ScoreResult
from tests.support.reward_process import TOKEN, Server, build_group
from tests.support.waiting import DEADLINE_SECONDS, wait_for

StartServer = Callable[..., Server]

CHILD_SECONDS = str(100_000 + os.getpid())
"""Identifies the child of a function among all processes of this machine."""

FAILING = r"""
import ctypes, json, os, signal, socket, struct, subprocess, sys, threading, time

NEITHER = json.dumps([{"score": None, "components": {}, "reason": None, "message": ""}]).encode()
ANSWER_OF_NEITHER = b"".join(struct.pack(">II", len(NEITHER), number) + NEITHER for number in range(1, 100))

def hang():
    while True:
        pass

def exhaust():
    return len(bytearray(8 << 30))

def print_garbage():
    for _ in range(100):
        print("\x00\xff" * 5000)
    os.write(1, b'{"score": 1}' + bytes(range(256)) * 100)
    return 1.0

def write_everywhere():
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\x00\x00\x00\x05\x00\x00\x00\x01hello")
        except OSError:
            pass
    return 1.0

def answer_neither():
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, ANSWER_OF_NEITHER)
        except OSError:
            pass
    hang()

def close_pipe_later():
    def close():
        time.sleep(0.2)
        for descriptor in range(3, 64):
            try:
                socket.socket(fileno=os.dup(descriptor)).shutdown(socket.SHUT_WR)
            except OSError:
                pass
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Thread(target=close).start()
    return 1.0

def fork_and_return():
    os.fork()
    return 1.0

def hang_with_a_child():
    subprocess.Popen(["sleep", "CHILD_SECONDS"])
    hang()

BEHAVIOURS = {
    "fine": lambda: 1.0,
    "zero": lambda: 0.0,
    "raise": lambda: [][1],
    "nan": lambda: float("nan"),
    "none": lambda: None,
    "text": lambda: "1.0",
    "os._exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), 9),
    "close": lambda: os.closerange(3, 100),
    "deep": lambda: (lambda f: f(f))(lambda f: f(f)),
    "memory": exhaust,
    "hang": hang,
    "sleep": lambda: time.sleep(1000),
    "print": print_garbage,
    "write": write_everywhere,
    "neither": answer_neither,
    "close later": close_pipe_later,
    "fork": fork_and_return,
    "child": hang_with_a_child,
    "large": lambda: {"score": 1.0} | {f"{i:0200}": i for i in range(1000)},
    "many": lambda: {"score": 1.0} | {str(i): i for i in range(1 << 20)},
    "token": lambda: float("RLJOB_TOKEN" in os.environ),
}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return BEHAVIOURS[solution_str]()
""".replace("CHILD_SECONDS", CHILD_SECONDS)

# Each call creates the file `ran-ID` when it starts, and waits until `go-ID` exists.
GATED = """
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    folder, name = ground_truth, solution_str
    open(f"{folder}/ran-{name}", "a").write("x")
    while not os.path.exists(f"{folder}/go-{name}"):
        time.sleep(0.005)
    return 1.0
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Shared memory: besides its scratch directory, a function may write only there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def failing(start_server: StartServer) -> Server:
    return start_server(FAILING, slots=2, timeoutSeconds=1)


@pytest.mark.parametrize(
    ("behaviour", "reason", "expected"),
    [
        ("raise", "exception", r"function\.inline:\d+: IndexError: list index out of range"),
        ("nan", "not_finite", "nan"),
        ("none", "abstained", "returned None"),
        ("text", "bad_return", "str '1.0'"),
        ("os._exit", "worker_died", "exit code 3"),
        ("sys.exit", "exception", "SystemExit: 3"),
        ("segfault", "worker_died", "SIGSEGV"),
        ("kill", "worker_died", "SIGKILL"),
        ("close", "worker_died", "pipe|exit code"),
        ("deep", "exception", "RecursionError"),
        ("memory", "exception", r"MemoryError.*maxMemory is 2Gi"),
        ("hang", "timeout", r"longer than 1 s \(timeoutSeconds\)"),
        ("sleep", "timeout", "was killed"),
        ("write", "worker_died", "garbage"),
        ("neither", "worker_died", "garbage"),
        ("child", "timeout", "was killed"),
        ("large", "bad_return", "more than 64 KiB"),
        ("many", "bad_return|timeout", "more than 1000 components|was killed"),
    ],
)
def test_failure_costs_one_invalid_result_with_its_reason(
    failing: Server, behaviour: str, reason: str, expected: str
) -> None:
    result = failing.score(behaviour)
    assert (result["valid"], result["score"]) == (False, None)
    assert re.fullmatch(reason, result["reason"]), result["message"]
    assert re.search(expected, result["message"]), result["message"]
    ScoreResult.model_validate(result)
    assert failing.score("fine")["score"] == 1.0, "the next request is served"


@pytest.mark.parametrize(("behaviour", "score"), [("fine", 1.0), ("zero", 0.0), ("print", 1.0), ("fork", 1.0)])
def test_printing_or_forking_does_not_disturb_the_result(failing: Server, behaviour: str, score: float) -> None:
    result = failing.score(behaviour)
    assert (result["valid"], result["score"]) == (True, score), result


def test_request_to_a_worker_with_a_closed_pipe_gets_a_result(start_server: StartServer) -> None:
    server = start_server(FAILING, slots=1, function={"spareWorkers": 0})
    [worker] = server.children()
    server.score("close later")
    wait_for(lambda: not worker.is_running() or worker.status() == "stopped", "the worker to close its pipe")
    assert server.score("fine")["reason"] in ("worker_died", None), "None: a new worker had replaced it"


def test_timeout_kills_the_worker_and_its_children(failing: Server) -> None:
    failing.score("child")
    wait_for(
        lambda: not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", CHILD_SECONDS]],
        "the child of the killed worker to end",
    )


def test_user_code_does_not_see_the_token(failing: Server) -> None:
    assert failing.score("token")["score"] == 0.0


def test_logged_output_of_a_function_is_bounded(failing: Server) -> None:
    for _ in range(4):
        failing.score("print")
    assert failing.log.stat().st_size < 2 << 20, "4 MB were printed"


def test_metrics_count_outcomes_restarts_and_slots(failing: Server) -> None:
    failing.score("fine", lane="eval")
    failing.score("os._exit")
    count = 'rljob_reward_execute_seconds_count{lane="%s",outcome="%s",reward="test"}'
    assert failing.metric(count % ("eval", "valid")) >= 1
    assert failing.metric(count % ("train", "worker_died")) >= 1
    assert failing.metric('rljob_reward_queue_seconds_count{lane="eval",outcome="valid",reward="test"}') >= 1
    assert failing.metric("rljob_reward_worker_restarts_total") >= 1
    assert failing.metric("rljob_reward_slots") == 2
    wait_for(lambda: failing.metric('rljob_reward_slots_in_use{lane="train"') == 0, "no slot to be in use")


def test_requests_without_the_token_are_refused(failing: Server) -> None:
    for path, method in (("/v1/score", "POST"), ("/v1/info", "GET"), ("/nowhere", "GET")):
        assert failing.request(method, path, token="wrong")[0] == 401, path
    assert failing.request("GET", "/rljob/ready", token="wrong")[0] == 200
    assert failing.request("GET", "/metrics", token="wrong")[0] == 200


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{", "body: Invalid JSON"),
        ({"id": "1", "prompt": "p"}, "completion: Field required"),
        ({"id": "1", "prompt": "p", "completion": "c", "lane": "fast"}, "lane: Input should be 'train' or 'eval'"),
        ({"id": "1", "prompt": "p", "completion": "c", "extra": 1}, "extra: Extra inputs"),
    ],
)
def test_malformed_request_is_answered_422_with_the_field(failing: Server, body: Any, expected: str) -> None:
    status, answer, _ = failing.request("POST", "/v1/score", body)
    assert status == 422
    assert expected in answer["detail"]


def test_other_methods_and_paths_are_refused(failing: Server) -> None:
    assert failing.request("GET", "/v1/score")[0] == 405
    assert failing.request("POST", "/v1/info", b"{}")[0] == 405
    assert failing.request("GET", "/nowhere")[0] == 404


def test_data_that_cannot_be_read_costs_one_sample(failing: Server) -> None:
    result = failing.score("fine", prompt="\ud83d")
    assert (result["valid"], result["reason"]) == (False, "bad_request"), result
    ScoreResult.model_validate(result)


def test_size_of_a_request_has_a_field_which_the_refusal_names(start_server: StartServer) -> None:
    source = "def compute_score(solution_str): return len(solution_str) / 2**20"
    server = start_server(source, slots=1, maxRequestSize="18Mi")
    assert server.score("x" * (17 << 20))["score"] == 17.0
    request = {"id": "x", "prompt": "", "completion": "x" * (18 << 20)}
    status, answer, _ = server.request("POST", "/v1/score", request)
    assert status == 413
    assert answer["detail"] == "the request body must have at most 18Mi; raise maxRequestSize"


def test_metrics_count_every_answer(failing: Server) -> None:
    def count(status: int) -> float:
        return failing.metric(f'rljob_reward_responses_total{{reward="test",status="{status}"')

    requests: dict[int, Callable[[], Any]] = {
        401: lambda: failing.request("GET", "/v1/info", token="wrong"),
        404: lambda: failing.request("GET", "/nowhere"),
        405: lambda: failing.request("GET", "/v1/score"),
        413: lambda: failing.request("POST", "/v1/score", b" " * (17 << 20)),
        422: lambda: failing.request("POST", "/v1/score", b"{}"),
        200: lambda: failing.score("fine"),
    }
    before = {status: count(status) for status in requests}
    assert [send()[0] for status, send in requests.items() if status != 200] == [401, 404, 405, 413, 422]
    requests[200]()
    assert [status for status in requests if count(status) <= before[status]] == []


def test_server_answers_whether_its_loop_runs(failing: Server) -> None:
    assert failing.request("GET", "/rljob/live", token="wrong")[0] == 200


def test_reward_with_scope_sample_refuses_groups_with_a_remedy(failing: Server) -> None:
    status, answer, _ = failing.request("POST", "/v1/score-group", build_group("a"))
    detail = "this reward has scope: sample; POST each sample to /v1/score, or set scope: group"
    assert (status, answer["detail"]) == (422, detail)
    assert failing.request("GET", "/v1/info")[1]["scope"] == "sample"


def test_info_describes_the_function(failing: Server) -> None:
    info = failing.request("GET", "/v1/info")[1]
    assert (info["name"], info["signature"], info["entrypoint"], info["slots"]) == ("test", "verl", "compute_score", 2)
    assert info["version"] == failing.score("fine")["version"]
    assert re.fullmatch("[0-9a-f]{64}", info["version"])


class GatedServer:
    """A server whose executions end when their gate opens."""

    def __init__(self, start: StartServer, folder: Path, **fields: Any) -> None:
        self.folder = folder
        environment = {"RLJOB_REWARD_DISABLE_ISOLATION": "private-shm"}
        self.server = start(GATED, environment=environment, timeoutSeconds=60, **fields)
        self._threads = ThreadPoolExecutor(32)

    def send(self, name: str, **fields: Any) -> Future[tuple[int, Any, dict[str, str]]]:
        body = {"id": name, "prompt": "p", "completion": name, "ground_truth": str(self.folder), **fields}
        return self._threads.submit(self.server.request, "POST", "/v1/score", body)

    def wait_running(self, name: str) -> None:
        wait_for((self.folder / f"ran-{name}").exists, f"{name} to run")

    def num_runs(self, name: str) -> int:
        path = self.folder / f"ran-{name}"
        return len(path.read_text()) if path.exists() else 0

    def wait_queued(self, number: int, lane: str = "train") -> None:
        line = f'rljob_reward_queue_length{{lane="{lane}"'
        wait_for(lambda: self.server.metric(line) == number, f"{number} requests in the {lane} queue")

    def open(self, *names: str) -> None:
        for name in names:
            (self.folder / f"go-{name}").touch()


def post_head(length: int) -> bytes:
    lines = ("POST /v1/score HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}", f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_full_queue_answers_429_and_lanes_do_not_share_it(start_server: StartServer, tmp_path: Path) -> None:
    gate = GatedServer(start_server, tmp_path, slots=1, queueLength=1)
    running = gate.send("a")
    gate.wait_running("a")
    queued = gate.send("b")
    gate.wait_queued(1)
    status, answer, headers = gate.send("c").result()
    assert status == 429, answer
    assert int(headers["retry-after"]) >= 1
    assert gate.server.metric('rljob_reward_refused_total{lane="train"') == 1
    evaluation = gate.send("e", lane="eval")
    gate.wait_queued(1, "eval")
    gate.open("a", "b", "e")
    assert [f.result()[0] for f in (running, queued, evaluation)] == [200] * 3


def test_evaluation_runs_while_the_train_lane_is_full(start_server: StartServer, tmp_path: Path) -> None:
    gate = GatedServer(start_server, tmp_path, slots=4)
    burst = [gate.send(f"t{number}") for number in range(6)]
    gate.wait_queued(3)
    gate.open("e")
    assert gate.send("e", lane="eval").result()[1]["valid"], "with every training request still waiting or running"
    gate.open(*(f"t{number}" for number in range(6)))
    assert all(future.result()[1]["valid"] for future in burst)


def test_retry_joins_the_first_and_a_late_one_gets_the_same_result(start_server: StartServer, tmp_path: Path) -> None:
    gate = GatedServer(start_server, tmp_path, slots=4)
    first = gate.send("a")
    gate.wait_running("a")
    second = gate.send("a")
    gate.send("b")
    gate.wait_running("b")
    gate.open("a", "b")
    assert first.result()[1] == second.result()[1] == gate.send("a").result()[1]
    assert gate.num_runs("a") == 1, "executed once"
    other = gate.send("a", data_source="another sample")
    assert other.result()[1]["valid"]
    assert gate.num_runs("a") == 2, "another request under the same id is not the same request"


def test_failed_result_is_not_remembered(failing: Server) -> None:
    before = failing.metric('rljob_reward_execute_seconds_count{lane="train",outcome="exception"')
    for _ in range(2):
        failing.score("raise", id="again")
    assert failing.metric('rljob_reward_execute_seconds_count{lane="train",outcome="exception"') == before + 2


def test_request_of_a_disconnected_client_is_dropped_from_the_queue(start_server: StartServer, tmp_path: Path) -> None:
    gate = GatedServer(start_server, tmp_path, slots=1)
    running = gate.send("a")
    gate.wait_running("a")
    body = json.dumps({"id": "b", "prompt": "p", "completion": "b", "ground_truth": str(tmp_path)}).encode()
    with socket.create_connection((gate.server.host, 8080)) as connection:
        connection.sendall(post_head(len(body)) + body)
        gate.wait_queued(1)
        port = connection.getsockname()[1]
    server = psutil.Process(gate.server.pid)
    wait_for(lambda: all(c.raddr[1:] != (port,) for c in server.net_connections()), "the server to see it close")
    gate.open("a", "b")
    assert running.result()[1]["valid"]
    cancelled = 'rljob_reward_execute_seconds_count{lane="train",outcome="cancelled"'
    wait_for(lambda: gate.server.metric(cancelled) == 1, "the request to be dropped")
    assert gate.num_runs("b") == 0


def test_client_that_leaves_frees_its_slot(start_server: StartServer, tmp_path: Path) -> None:
    gate = GatedServer(start_server, tmp_path, slots=1)
    body = json.dumps({"id": "a", "prompt": "p", "completion": "a", "ground_truth": str(tmp_path)}).encode()
    with socket.create_connection((gate.server.host, 8080)) as connection:
        connection.sendall(post_head(len(body)) + body)
        gate.wait_running("a")
    gate.open("b")
    assert gate.send("b").result()[1]["valid"], "although the gate of the first one is still closed"
    assert gate.server.metric('rljob_reward_execute_seconds_count{lane="train",outcome="cancelled"') == 1


def test_slow_clients_delay_neither_others_nor_the_end(start_server: StartServer) -> None:
    server = start_server("def compute_score(solution_str): return 1.0")
    with contextlib.ExitStack() as slow:
        for _ in range(500):
            connection = slow.enter_context(socket.create_connection((server.host, 8080)))
            connection.sendall(b"POST /v1/score HTTP/1.1\r\nX: ")
        assert server.score("x")["valid"]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DEADLINE_SECONDS) == ExitCode.SUCCEEDED


def test_connections_without_the_token_do_not_use_up_all_open_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("few-files")
    function = "def compute_score(solution_str): return 1.0"
    (folder / "service.yaml").write_text(json.dumps({"name": "test", "function": {"inline": function}}))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nulimit -n 256\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    server = Server(folder, f"127.11.{1 + os.getpid() % 200}.1", [], {}, python=str(python))
    try:
        wait_for(server.is_ready, "the server to be ready")
        with contextlib.ExitStack() as idle:
            for _ in range(400):
                idle.enter_context(socket.create_connection((server.host, 8080)))
            assert server.score("x")["valid"]
    finally:
        server.stop()


def test_sigterm_finishes_accepted_requests_and_leaves_no_process(start_server: StartServer, tmp_path: Path) -> None:
    gate = GatedServer(start_server, tmp_path, slots=2)
    accepted = [gate.send(name) for name in ("a", "b", "c")]
    gate.wait_queued(1)
    workers = gate.server.children()
    gate.server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: not gate.server.is_ready(), "the server to be unready")
    assert gate.send("d").result()[0] == 503
    gate.open("a", "b", "c")
    assert [future.result()[1]["valid"] for future in accepted] == [True] * 3
    assert gate.server.process.wait(DEADLINE_SECONDS) == ExitCode.SUCCEEDED
    assert not [worker for worker in workers if worker.is_running()]


def test_request_whose_body_ends_after_sigterm_is_refused(start_server: StartServer) -> None:
    server = start_server("def compute_score(solution_str): return 1.0")
    body = json.dumps({"id": "a", "prompt": "p", "completion": "c"}).encode()
    with contextlib.closing(http.client.HTTPConnection(server.host, 8080, timeout=DEADLINE_SECONDS)) as connection:
        connection.putrequest("POST", "/v1/score")
        connection.putheader("Authorization", f"Bearer {TOKEN}")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:10])
        server.score("so that the server has read the first part")
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not server.children(), "the workers to exit")
        connection.send(body[10:])
        assert connection.getresponse().status == 503
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.SUCCEEDED


def test_requests_that_outlast_the_grace_period_are_cancelled(start_server: StartServer, tmp_path: Path) -> None:
    gate = GatedServer(start_server, tmp_path, slots=1, arguments=["--grace", "0.2"])
    running = gate.send("a")
    gate.wait_running("a")
    queued = gate.send("b")
    gate.wait_queued(1)
    gate.server.process.send_signal(signal.SIGTERM)
    assert [f.result()[1]["reason"] for f in (running, queued)] == ["cancelled"] * 2
    assert gate.server.process.wait(DEADLINE_SECONDS) == ExitCode.SUCCEEDED


LEAVING = r"""
import os, subprocess

def leave(seconds):
    command = f"setsid sleep {seconds} >/dev/null 2>&1 & echo $!"
    return float(subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "exit":
        leave(0)
        os._exit(3)
    return leave(1000)
"""


def test_orphans_of_a_function_end_with_their_sample_and_are_reaped(start_server: StartServer) -> None:
    server = start_server(LEAVING, slots=1)
    pids = [int(server.score("leave")["score"]) for _ in range(2)]
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), "the processes to end and to be reaped")


def test_reaping_orphans_keeps_the_exit_status_of_workers(start_server: StartServer) -> None:
    server = start_server(LEAVING, slots=4, failurePolicy={"retries": 0})
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(server.score, ["exit"] * 20))
    assert {result["message"] for result in results} == {"the worker process ended with exit code 3"}
    wait_for(
        lambda: not any(_is_zombie(child) for child in server.children()),
        "all zombies to be reaped",
    )


def _is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just been reaped
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return False


def test_sigterm_during_a_long_import_ends_the_server(start_server: StartServer) -> None:
    server = start_server("import time\ntime.sleep(600)\ndef compute_score(): ...", wait=False)
    [worker] = wait_for(server.children, "the worker to start")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.SUCCEEDED
    assert not worker.is_running()


def test_killed_server_leaves_no_worker_behind(start_server: StartServer) -> None:
    server = start_server(FAILING, slots=2)
    threading.Thread(target=_score_until_killed, args=(server,), daemon=True).start()
    wait_for(lambda: server.metric('rljob_reward_slots_in_use{lane="train"') == 1, "the hanging call to run")
    workers = server.children()
    assert workers
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not [w for w in workers if w.is_running() and w.status() != "zombie"], "the workers to exit")


def _score_until_killed(server: Server) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        server.score("hang")


def test_unused_slots_have_no_process(start_server: StartServer) -> None:
    server = start_server("def compute_score(solution_str): return 1.0", slots=64)
    server.score("x")
    assert len(server.children()) <= 2


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "def compute_score(x): return 1",
            r"function\.inline:1: compute_score\(x\) does not match a convention",
        ),
        ("import nowhere", "ModuleNotFoundError"),
        ("import os; os._exit(0)", "while it was imported, the worker process ended with exit code 0"),
    ],
)
def test_unservable_function_ends_the_server_before_it_listens(
    start_server: StartServer, source: str, expected: str
) -> None:
    server = start_server(source, wait=False)
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.USER
    log = server.log.read_text()
    assert re.search(expected, log), log
    assert "Traceback" not in log


def test_port_in_use_is_an_error_with_a_remedy(start_server: StartServer, failing: Server) -> None:
    server = start_server(FAILING, wait=False, arguments=["--host", failing.host])
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.INFRASTRUCTURE
    assert f"cannot listen on {failing.host}:8080: Address already in use" in server.log.read_text()


def test_check_prints_the_function_without_serving_it(start_server: StartServer) -> None:
    server = start_server(FAILING, wait=False, arguments=["--check"])
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.SUCCEEDED
    assert "test: compute_score, signature verl, version" in server.log.read_text()
