"""isolation: request. A real server whose function tries to spoil what later requests find."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

from tests.support.reward_process import Server
from tests.support.waiting import wait_for

StartServer = Callable[..., Server]
SOURCE = r"""
import ctypes, json, os, resource, signal, subprocess, sys, threading, time

class Verifier:
    strict = True
    def is_right(self, text):
        return text == "right"

verifier = Verifier()
open(os.environ["TMPDIR"] + "/from-import", "w").close()
libc = ctypes.CDLL(None, use_errno=True)

def refused(call, *arguments):
    try:
        call(*arguments)
    except (OSError, ValueError):  # of resource, for EPERM
        return True
    return False

def patch(_):
    Verifier.is_right = lambda self, text: True
    json.loads = lambda *_: {}
    sys.modules.clear()
    return 0.0

def touch(_):
    worker = os.getppid()
    attempts = {
        "mem": refused(open, f"/proc/{worker}/mem", "r+b"),
        "environ": refused(open, f"/proc/{worker}/environ"),
        "fd": all(refused(os.readlink, f"/proc/{worker}/fd/{number}") for number in range(10)),
        "kill": refused(os.kill, worker, signal.SIGCONT),
        "killpg": refused(os.killpg, worker, signal.SIGCONT),
        "prlimit": refused(resource.prlimit, worker, resource.RLIMIT_NOFILE, (3, 3)),
        "ptrace": libc.ptrace(16, worker, 0, 0) == -1,
    }
    return 1.0 if all(attempts.values()) else str(attempts)

def sockets(_):
    kinds = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name.isdigit()
             and os.path.exists(f"/proc/self/fd/{name}")]
    return float(any(kind.startswith("socket") for kind in kinds))

def stop_group(_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    return 1.0

def leave_daemon(_):
    return float(subprocess.Popen(["setsid", "sleep", "1000"]).pid)

def leave_thread(_):
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return 1.0

def leave_files(_):
    for folder in (os.environ["TMPDIR"], "/dev/shm"):
        open(f"{folder}/left", "x").close()
    return 1.0

BEHAVIOURS = {
    "os._exit": lambda _: os._exit(3),
    "segfault": lambda _: ctypes.string_at(0),
    "raise": lambda _: 1 / 0,
    "memory": lambda _: len(bytearray(10 << 30)),
    "endless": lambda _: exec("while True: pass"),
    "pid": lambda _: float(os.getpid()),
    "worker": lambda _: float(os.getppid()),
}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if behaviour := BEHAVIOURS.get(solution_str) or globals().get(solution_str):
        return behaviour(ground_truth)
    return float(verifier.is_right(solution_str))
"""


@pytest.fixture(scope="module", params=["", "uid", "uid,seccomp-listener"], ids=lambda names: f"without-{names}")
def disabled(request: pytest.FixtureRequest) -> str:
    """Disabled mechanisms."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(disabled: str, start_server: StartServer) -> Server:
    environment = {"RLJOB_REWARD_DISABLE_ISOLATION": disabled}
    function = {"isolation": "request", "maxProcesses": 4, "spareWorkers": 0, "maxMemory": "1Gi"}
    return start_server(SOURCE, environment=environment, slots=1, timeoutSeconds=5, function=function)


def test_a_request_cannot_change_the_results_of_later_ones(server: Server) -> None:
    assert server.score("patch")["score"] == 0.0
    results = [server.score("wrong") for _ in range(40)]
    assert [result["score"] for result in results] == [0.0] * 40, results[0]["message"]
    assert server.score("right")["score"] == 1.0


def test_each_request_has_a_process_and_all_have_one_worker(server: Server) -> None:
    assert len({server.score("pid")["score"] for _ in range(3)}) == 3
    assert len({server.score("worker")["score"] for _ in range(3)}) == 1


@pytest.mark.parametrize("behaviour", ["touch", "stop_group"])
def test_a_request_cannot_touch_its_worker(server: Server, behaviour: str) -> None:
    worker = server.score("worker")["score"]
    result = server.score(behaviour)
    assert result["score"] == 1.0, result["message"]
    assert server.score("worker")["score"] == worker


def test_a_request_does_not_have_the_socket_of_its_worker(server: Server) -> None:
    assert server.score("sockets")["score"] == 0.0


@pytest.mark.parametrize(
    ("behaviour", "reason", "message"),
    [
        ("os._exit", "worker_died", "the process of the call ended with exit code 3"),
        ("segfault", "worker_died", "was ended by SIGSEGV"),
        ("raise", "exception", "ZeroDivisionError"),
        ("memory", "exception", "maxMemory is 1Gi"),
    ],
)
def test_failure_costs_one_result_and_not_the_worker(server: Server, behaviour: str, reason: str, message: str) -> None:
    worker = server.score("worker")["score"]
    result = server.score(behaviour)
    assert (result["valid"], result["reason"]) == (False, reason), result["message"]
    assert message in result["message"]
    assert server.score("worker")["score"] == worker


def test_endless_loop_is_a_timeout_and_its_process_ends(server: Server) -> None:
    assert server.score("endless")["reason"] == "timeout"
    assert server.score("right")["score"] == 1.0
    wait_for(lambda: len(server.children()) == 1, "the process of the request to end")


def test_what_a_request_leaves_ends_with_it(server: Server, disabled: str) -> None:
    for _ in range(3):
        for behaviour in ("leave_files", "leave_thread"):
            result = server.score(behaviour)
            assert result["score"] == 1.0, result["message"]
    if "seccomp-listener" in disabled:
        return  # a daemon ends with its worker
    worker = server.score("worker")["score"]
    daemon = int(server.score("leave_daemon")["score"])
    wait_for(lambda: not psutil.pid_exists(daemon), "the daemon to end")
    assert server.score("worker")["score"] == worker


def test_import_that_leaves_a_thread_is_refused_with_its_name(start_server: StartServer) -> None:
    source = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,), name="refresher", daemon=True).start()
def compute_score(solution_str, ground_truth): return 1.0
"""
    server = start_server(source, wait=False, slots=1, function={"isolation": "request"})
    wait_for(lambda: server.process.poll() is not None, "the server to end")
    log = server.log.read_text()
    assert "left threads that run: refresher. isolation: request forks" in log
    assert "Traceback" not in log


def test_async_function_is_awaited_in_the_process_of_its_request(start_server: StartServer) -> None:
    source = """
import asyncio, os

async def compute_score(solution_str, ground_truth):
    await asyncio.sleep(0)
    return float(os.getpid())
"""
    server = start_server(source, slots=1, function={"isolation": "request"})
    assert len({server.score("x")["score"] for _ in range(3)}) == 3


def test_instance_of_a_class_keeps_its_state_of_the_import_alone(start_server: StartServer) -> None:
    source = """
class Counter:
    def __init__(self):
        self.count = 0

    def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
        self.count += 1
        return float(self.count)

    def post_process_scores(self, group):
        return [sample["score"] for sample in group]
"""
    server = start_server(source, slots=1, scope="sampleThenGroup", function={"isolation": "request"})
    assert [server.score("x")["score"] for _ in range(3)] == [1.0] * 3
