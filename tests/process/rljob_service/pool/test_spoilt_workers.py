"""Functions that spoil their process, or leave something behind: other samples do not notice."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.support.reward_process import Server
from tests.support.waiting import DEADLINE_SECONDS, wait_for

StartServer = Callable[..., Server]
RETRIES = 2
"""The default of failurePolicy.retries."""
MARK = str(200_000 + os.getpid())
"""Identifies the processes that the functions start among all of this machine."""
_numbers = itertools.count(1)

LEAKING = r"""
import os
kept = []

def memory():
    kept.append(bytearray(8 << 20))

def files():
    kept.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(100))

def compute_score(solution_str):
    globals()[solution_str]()
    return 1.0
"""

BREAKING = r"""
import os

def compute_score(solution_str):
    if solution_str == "pid":
        raise ValueError(os.getpid())
    if solution_str == "break":
        globals()["float"] = None
        return 1.0
    return float(len(solution_str))
"""

LEAVING = r"""
import ctypes, multiprocessing, os, signal, subprocess, sys, threading, time

SPIN = ["sh", "-c", "while :; do :; done", "MARK"]
executor = None

def shell():
    try:
        subprocess.run("sh -c 'while :; do :; done' MARK", shell=True, timeout=0.05)
    except subprocess.TimeoutExpired:
        pass

def child():
    subprocess.Popen(SPIN)

def daemon():
    subprocess.run(["sh", "-c", "setsid sh -c 'while :; do :; done' MARK &"])

def fork():
    os.fork()

def forked_child_that_raises():
    if os.fork() == 0:
        raise ValueError

def lazy_pool():
    global executor
    if executor is None:
        import concurrent.futures
        executor = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    assert executor.submit(abs, -1).result() == 1

def lazy_multiprocessing_pool():
    global executor
    if executor is None:
        executor = multiprocessing.get_context("fork").Pool(1)
    assert executor.map(abs, [-1]) == [1]

def alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.2)

def exit_later():
    threading.Timer(0.2, os._exit, (3,)).start()

def exit_in_thread():
    threading.Thread(target=lambda: (time.sleep(0.2), os._exit(3))).start()

def wait():
    time.sleep(0.5)

def compute_score(solution_str):
    globals()[solution_str]()
    return float(os.getpid())
""".replace("MARK", MARK)


def score_with_retries(server: Server, completion: str) -> tuple[Any, int]:
    """Return the last result and the number of attempts, as the driver would make them."""
    name = f"sample-{next(_numbers)}"
    result, num_attempts = server.score(completion, id=name), 1
    while not result["valid"] and num_attempts <= RETRIES:
        result, num_attempts = server.score(completion, id=name), num_attempts + 1
    return result, num_attempts


def score_many(server: Server, completions: list[str]) -> tuple[list[Any], Counter[int]]:
    """Score from 16 threads. Return the results, and how many took each number of attempts."""
    with ThreadPoolExecutor(16) as threads:
        scored = list(threads.map(lambda completion: score_with_retries(server, completion), completions))
    return [result for result, _ in scored], Counter(attempts for _, attempts in scored)


@pytest.mark.parametrize("leak", ["memory", "files"])
def test_samples_are_valid_after_retries_though_the_function_leaks(start_server: StartServer, leak: str) -> None:
    server = start_server(LEAKING, slots=16, function={"maxMemory": "256Mi"})
    results, attempts = score_many(server, [leak] * 300)
    # All 16 workers leak at the same rate, so all attempts of a sample may meet one that is about to be replaced.
    invalid = [result["message"] for result in results if not result["valid"]]
    assert len(invalid) <= 3, invalid
    assert attempts[1] > 250, f"a leak costs about one attempt per worker: {attempts}"
    assert "it ran out of " in server.log.read_text()


def test_one_spoilt_worker_of_16_does_not_draw_the_work(start_server: StartServer) -> None:
    server = start_server(BREAKING, slots=16)
    score_many(server, ["fine"] * 100)
    assert server.score("break")["valid"]
    results, attempts = score_many(server, ["fine"] * 500)
    assert [result["message"] for result in results if result["score"] != 4.0] == []
    assert attempts[2] + attempts[3] <= 3, f"a worker is replaced after three failures in a row: {attempts}"


def test_retry_meets_another_worker(start_server: StartServer) -> None:
    server = start_server(BREAKING, slots=1)
    pids: set[str] = set()
    wait_for(lambda: pids.add(server.score("pid")["message"]) or len(pids) == 2, "the spare worker to serve")
    server.score("break")
    for _ in range(10):
        result, attempts = score_with_retries(server, "fine")
        assert (result["score"], attempts <= 2) == (4.0, True), result["message"]


def test_worker_is_replaced_after_max_requests_without_a_failure(start_server: StartServer) -> None:
    source = "import os\ndef compute_score(solution_str): return float(os.getpid())"
    server = start_server(source, slots=1, function={"maxRequests": 2})
    workers = Counter(server.score("x")["score"] for _ in range(10))
    assert set(workers.values()) == {2}
    assert "it served 2 requests (maxRequests)" in server.log.read_text()


@pytest.fixture(scope="module")
def leaving(start_server: StartServer) -> Server:
    return start_server(LEAVING, slots=2)


def _marked() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if MARK in (p.info["cmdline"] or [])]


@pytest.mark.parametrize("behaviour", ["shell", "child", "daemon"])
def test_processes_of_a_sample_end_with_it_and_the_worker_stays(leaving: Server, behaviour: str) -> None:
    pids = {leaving.score(behaviour)["score"] for _ in range(3)}
    wait_for(lambda: not _marked(), "the processes of the samples to end")
    assert pids <= {leaving.score(behaviour)["score"] for _ in range(4)}, "workers serve on"


@pytest.mark.parametrize("behaviour", ["fork", "forked_child_that_raises", "lazy_pool", "lazy_multiprocessing_pool"])
def test_worker_that_forked_is_replaced_and_no_sample_is_lost(leaving: Server, behaviour: str) -> None:
    for _ in range(4):
        result = leaving.score(behaviour)
        assert result["valid"], result["message"]


@pytest.mark.parametrize("behaviour", ["alarm", "exit_later", "exit_in_thread"])
def test_later_samples_do_not_pay_for_a_leftover_timer_or_thread(leaving: Server, behaviour: str) -> None:
    for _ in range(2):
        assert leaving.score(behaviour)["valid"]
        results = [leaving.score("wait") for _ in range(2)]
        assert all(result["valid"] for result in results), [result["message"] for result in results]


def test_pool_of_the_import_stays(start_server: StartServer) -> None:
    source = (
        "import concurrent.futures as f, multiprocessing as m, subprocess\n"
        "pool = f.ProcessPoolExecutor(1, m.get_context('fork'))\n"
        "pool.submit(abs, 1).result()\n"
        "def compute_score(solution_str):\n"
        "    subprocess.run(['true'])\n"
        "    return pool.submit(len, solution_str).result()\n"
    )
    server = start_server(source, slots=1)
    workers = {child.pid for child in server.children()}
    assert [server.score("abc")["score"] for _ in range(4)] == [3.0] * 4
    assert "is replaced" not in server.log.read_text()
    assert workers & {child.pid for child in server.children()}


def test_spare_worker_takes_over_from_a_killed_one(start_server: StartServer) -> None:
    source = (
        "import os, time\n"
        "def compute_score(solution_str):\n"
        "    if solution_str == 'hang':\n"
        "        time.sleep(1000)\n"
        "    return float(os.getpid())\n"
    )
    server = start_server(source, slots=1, timeoutSeconds=1)
    wait_for(lambda: len(server.children()) == 2, "the spare worker")
    known = {child.pid for child in server.children()}
    assert server.score("hang")["reason"] == "timeout"
    assert server.score("x")["score"] in known, "no import was waited for"


def test_server_is_unready_while_no_worker_can_start(start_server: StartServer) -> None:
    """The first worker starts; later imports hang, as with a lock that the first one left."""
    source = (
        "import os, time, pathlib\n"
        "path = pathlib.Path('/dev/shm/rljob-test-MARK')\n"
        "if path.exists():\n"
        "    time.sleep(1000)\n"
        "path.touch()\n"
        "def compute_score(solution_str): os._exit(1)\n"
    ).replace("MARK", MARK)
    path = f"/dev/shm/rljob-test-{MARK}"
    try:
        disabled = {"RLJOB_REWARD_DISABLE_ISOLATION": "private-shm"}
        server = start_server(source, environment=disabled, slots=1)
        server.score("x")
        wait_for(lambda: not server.is_ready(), "the server to be unready")
        assert "the import of function.inline has taken" in server.log.read_text()
        assert "function.inline:4" in server.log.read_text()
    finally:
        os.unlink(path)


def test_import_that_hangs_is_reported_and_then_fails(start_server: StartServer) -> None:
    source = "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()\ndef compute_score(): ..."
    server = start_server(source, wait=False, function={"importTimeoutSeconds": 4})
    report = re.compile(r"reward test: the import of function\.inline has taken \d+ s so far, now at \S+:4")
    wait_for(lambda: report.search(server.log.read_text()), "a report")
    assert server.process.wait(DEADLINE_SECONDS) == 78
    expected = "it took more than 4 s (function.importTimeoutSeconds) and is still at function.inline:4"
    assert expected in server.log.read_text()
