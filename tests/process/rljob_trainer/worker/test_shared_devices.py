"""The trainer Pod's program with two engines, which are stubs, and a process in place of Ray's node."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rljob_api.wire.contract import PORT_ENGINES, PORT_RAY, ExitCode, UrlPath
from rljob_api.wire.weights import EnginesReport
from tests.process.rljob_trainer.worker.test_main import PORT, listen
from tests.support.loopback import next_address
from tests.support.model_folder import write_model
from tests.support.waiting import DEADLINE_SECONDS, wait_for
from tests.unit.rljob_trainer.worker.test_main import JOB

OFFSET = PORT - PORT_RAY

# An engine that records its requests. A file NUMBER.does says how it behaves.
ENGINE_PROGRAM = """
import http.server, os, sys
number, folder = os.environ["RLJOB_ENGINE"], sys.argv[1]
def does():
    try:
        return open(f"{folder}/{number}.does").read()
    except FileNotFoundError:
        return ""
if does() == "misconfigured":
    open(os.environ["RLJOB_TERMINATION_LOG"], "w").write("error: spec.rollout.extraArgs: no such option")
    sys.exit(78)
if does() == "breaks":
    sys.exit(75)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        assert self.headers["Authorization"] == "Bearer secret"
        status = {"warms up": 409, "fails": 500}.get(does(), 200)
        with open(f"{folder}/{number}.calls", "a") as file:
            file.write(f"{os.getpid()} {os.environ['CUDA_VISIBLE_DEVICES']} {self.path} {status}\\n")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{"num_bytes": 10, "seconds": 0.1}')
    def log_message(self, *_):
        pass
port = 8000 + int(os.environ["RLJOB_PORT_OFFSET"]) + int(number)
http.server.ThreadingHTTPServer((os.environ["RLJOB_POD_IP"], port), Handler).serve_forever()
"""

WORKER_PROGRAM = """
import sys
from rljob_trainer.worker import main
main._POLL_SECONDS, main._HEAD_GONE_SECONDS, main._WAIT_LOG_SECONDS = 0.05, 0.3, 0.2
main.build_command = lambda address, head, *_: [sys.executable, "-c", "import time; time.sleep(600)", "node"]
main.ROLLOUT = main.SERVED_MODEL = [sys.executable, sys.argv[1], sys.argv[2]]
sys.exit(main.main())
"""


class TrainerPod:
    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.address, self.head = folder, folder / "log", next_address(), next_address()
        job: dict[str, Any] = copy.deepcopy(JOB)
        job["spec"] |= {
            "schedule": {"type": "synchronous"},
            "trainer": {"gpusPerReplica": 2},
            "rollout": {"placement": "trainer", "gpusPerReplica": 1},
        }
        self._write_job(job)
        (folder / "hosts").write_text(f"{self.head} head\n")
        (folder / "engine.py").write_text(ENGINE_PROGRAM)
        variables = {
            "RLJOB_POD_IP": self.address,
            "RLJOB_HEAD": "head",
            "RLJOB_TOKEN": "secret",
            "RLJOB_JOB_FILE": str(folder / "job.yaml"),
            "RLJOB_MODEL": str(write_model(folder / "model")),
            "RLJOB_HOSTS_FILE": str(folder / "hosts"),
            "RLJOB_PORT_OFFSET": str(OFFSET),
            "RLJOB_TERMINATION_LOG": str(folder / "termination"),
            "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        }
        self._job, self._variables = job, variables

    def add_reward_model(self) -> None:
        """Let a reward's model share both GPUs. Its engine has the number 2."""
        self._job["spec"]["rewards"] = [
            {"name": "rm", "model": {"source": "/m", "placement": "trainer", "gpusPerReplica": 2}}
        ]
        self._write_job(self._job)

    def _write_job(self, job: dict[str, Any]) -> None:
        (self.folder / "job.yaml").write_text(yaml.safe_dump(job))

    def start(self) -> None:
        command = [sys.executable, "-c", WORKER_PROGRAM, str(self.folder / "engine.py"), str(self.folder)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env={**os.environ, **self._variables}, stdout=log, stderr=log)

    def set(self, number: int, does: str) -> None:
        (self.folder / f"{number}.does").write_text(does)

    def calls(self, number: int) -> list[str]:
        file = self.folder / f"{number}.calls"
        return [line.partition(" ")[2] for line in file.read_text().splitlines()] if file.exists() else []

    def turn(self, query: str) -> EnginesReport:
        return EnginesReport.model_validate_json(self.request(query))

    def wait_for_turn(self, query: str, num_restarts: int) -> None:
        """Ask until both engines are warm after so many restarts."""

        def has_both() -> bool:
            report = self.turn(query)
            return (report.num_running, report.num_restarts) == (2, num_restarts)

        self.wait_for(has_both)

    def request(self, query: str, token: str = "secret") -> bytes:
        url = f"http://{self.address}:{PORT_ENGINES + OFFSET}{UrlPath.ENGINES}?{query}"
        request = urllib.request.Request(url, b"", {"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as response:
            body: bytes = response.read()
        return body

    def find(self, argument: str) -> list[int]:
        """Return the descendants with this text in one of their last two arguments."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if any(argument in part for part in process.cmdline()[-2:]):
                    found.append(process.pid)
            except psutil.NoSuchProcess:
                continue
        return sorted(found)

    def engines(self) -> list[int]:
        return self.find("engine.py")

    def nodes(self) -> list[int]:
        return self.find("node")

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        def check() -> Any:
            assert self.process.poll() is None, self.log.read_text()
            return condition()

        try:
            return wait_for(check, "the Pod")
        except AssertionError as error:
            raise AssertionError(self.log.read_text()) from error


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[TrainerPod]:
    pod = TrainerPod(tmp_path)
    yield pod
    pod.process.terminate()  # it ends its engines; SIGKILL would leave them
    try:
        pod.process.wait(DEADLINE_SECONDS)
    finally:
        pod.process.kill()


def test_engines_and_ranks_take_turns_whatever_dies(pod: TrainerPod) -> None:
    pod.set(1, "warms up")
    pod.start()
    with listen(pod.head):
        pod.wait_for(lambda: "waiting for the engines, before joining a head: engine 1: it starts" in log(pod))
        assert not pod.nodes()
        assert pod.calls(0) == ["GPU-a /rljob/sleep 200"]
        pod.set(1, "")
        pod.wait_for(pod.nodes)
        assert pod.calls(1)[-1] == "GPU-b /rljob/sleep 200"

        report = pod.turn("turn=rollouts&want=g:1")
        assert (report.num_running, report.num_restarts, report.num_bytes) == (2, 0, 20)
        assert {pod.calls(number)[-1][6:] for number in (0, 1)} == {"/rljob/wake?want=g:1 200"}

        # Awake: it starts again at once, and is asked for the same weights.
        os.kill(pod.engines()[0], signal.SIGKILL)
        pod.wait_for_turn("turn=rollouts&want=g:1", num_restarts=1)

        # Asleep: it starts again in the next turn of the rollouts.
        pod.turn("turn=trainer")
        os.kill(pod.engines()[0], signal.SIGKILL)
        pod.wait_for(lambda: pod.turn("turn=trainer").num_running == 1)  # once its end is noticed
        assert len(pod.engines()) == 1
        pod.wait_for_turn("turn=rollouts&want=g:2", num_restarts=2)

        # One that does not fall asleep is killed, so that its memory is free.
        pod.set(0, "fails")
        report = pod.turn("turn=trainer")
        assert (report.num_running, report.num_bytes, len(pod.engines())) == (1, 10, 1)
        pod.set(0, "")
        pod.wait_for_turn("turn=rollouts&want=g:3", num_restarts=3)

        # The node ends: the engines outlive it, and sleep before the next one joins.
        engines, nodes = pod.engines(), pod.nodes()
        os.kill(nodes[0], signal.SIGKILL)
        pod.wait_for(lambda: pod.nodes() not in ([], nodes))
        assert pod.engines() == engines
        assert {pod.calls(number)[-1][6:] for number in (0, 1)} == {"/rljob/sleep 200"}

        for query, token, status in (("turn=head", "secret", 400), ("turn=trainer", "wrong", 401)):
            with pytest.raises(urllib.error.HTTPError) as error:
                pod.request(query, token)
            assert error.value.code == status
        every = [pod.process.pid, *pod.engines(), *pod.nodes()]
        pod.process.terminate()
        assert pod.process.wait(DEADLINE_SECONDS) == ExitCode.SUCCEEDED
        assert not any(map(psutil.pid_exists, every[1:])), "nothing outlives the Pod"


def test_model_of_a_reward_takes_the_turns_of_the_rollouts(pod: TrainerPod) -> None:
    pod.add_reward_model()
    pod.set(1, "warms up")
    pod.start()
    with listen(pod.head):
        pod.wait_for(lambda: "waiting for the engines, before joining a head: engine 1: it starts" in log(pod))
        assert pod.calls(2) == [], "it starts once the rollouts on its GPUs sleep"
        pod.set(1, "")
        pod.wait_for(pod.nodes)
        assert pod.calls(2) == ["GPU-a,GPU-b /rljob/sleep 200"]

        report = pod.turn("turn=rollouts&want=g:1")
        assert (report.num_running, report.num_bytes, report.model_bytes) == (3, 20, 10)
        assert pod.calls(2)[-1] == "GPU-a,GPU-b /rljob/wake 200"
        assert pod.turn("turn=trainer").model_bytes == 10
        assert pod.calls(2)[-1] == "GPU-a,GPU-b /rljob/sleep 200"

        # Asleep, and later with an error as at a wrong setting: it was warm, so its settings are right.
        pod.set(2, "misconfigured")
        os.kill(pod.engines()[2], signal.SIGKILL)
        pod.wait_for(lambda: pod.turn("turn=trainer").num_running == 2)
        pod.turn("turn=rollouts&want=g:2")
        pod.wait_for(lambda: "engine 2 ended with 78" in log(pod))
        pod.set(2, "")
        pod.wait_for(lambda: pod.turn("turn=rollouts&want=g:2").num_running == 3)
        assert pod.calls(2)[-1] == "GPU-a,GPU-b /rljob/wake 200"


def test_wrong_configuration_of_an_engine_ends_the_pod(pod: TrainerPod) -> None:
    pod.set(0, "breaks")
    pod.set(1, "warms up")
    pod.start()
    pod.wait_for(lambda: "engine 0 ended with 75; it starts again after 1 s" in log(pod))
    pod.wait_for(lambda: "engine 0 ended with 75; it starts again after 2 s" in log(pod))
    pod.set(0, "misconfigured")
    assert pod.process.wait(DEADLINE_SECONDS) == ExitCode.USER
    assert (pod.folder / "termination").read_text() == "error: spec.rollout.extraArgs: no such option"


def log(pod: TrainerPod) -> str:
    return pod.log.read_text()
