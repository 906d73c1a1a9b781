"""The trainer Pod's program follows the head, and leaves no process behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
import yaml

from rljob_api.wire.contract import PORT_DRIVER, PORT_RAY
from tests.support.loopback import next_address
from tests.support.model_folder import write_model
from tests.support.waiting import DEADLINE_SECONDS
from tests.unit.rljob_trainer.worker.test_main import JOB

PORT = 23791

# Starts an orphan that ignores SIGTERM, and prints its process id before and the number of descendants after.
ORPHAN_PROGRAM = """
import subprocess, sys
import psutil
from rljob_trainer.worker.main import adopt_orphans, terminate_descendants
adopt_orphans()
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True)"
child = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
child.stdout.readline()
child.wait()
print(*[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
terminate_descendants(0.1)
print(len(psutil.Process().children(recursive=True)), flush=True)
"""

# The worker, with a process that sleeps in place of Ray's node.
WORKER_PROGRAM = """
import sys
from rljob_trainer.worker import main
main._LOOKUP_SECONDS = 0.1
main._HEAD_GONE_SECONDS = float(sys.argv[1])
main._POLL_SECONDS = 0.05
main.build_command = lambda address, head, *_: [sys.executable, "-c", "import time; time.sleep(600)", head]
sys.exit(main.main())
"""


def test_all_descendants_end_including_orphans_and_sigterm_ignorers():
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN_PROGRAM], capture_output=True, text=True, timeout=300, check=True
    )
    orphans, num_left = done.stdout.splitlines()
    assert orphans, "the orphan must be found"
    assert num_left == "0"
    assert not any(psutil.pid_exists(int(process)) for process in orphans.split())


class TrainerPod:
    """The worker's program and its hosts file."""

    def __init__(self, folder: Path, head_gone_seconds: float) -> None:
        self.hosts, self.log = folder / "hosts", folder / "log"
        self.hosts.write_text("")
        (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
        variables = {
            "RLJOB_POD_IP": next_address(),
            "RLJOB_HEAD": "head",
            "RLJOB_JOB_FILE": str(folder / "job.yaml"),
            "RLJOB_MODEL": str(write_model(folder / "model")),
            "RLJOB_HOSTS_FILE": str(self.hosts),
            "RLJOB_PORT_OFFSET": str(PORT - PORT_RAY),
            "RLJOB_TOKEN": "secret",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER_PROGRAM, str(head_gone_seconds)],
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
            )

    def name_head(self, *addresses: str) -> None:
        new = self.hosts.with_suffix(".new")
        new.write_text("".join(f"{address} head\n" for address in addresses))
        new.replace(self.hosts)

    def nodes(self) -> dict[int, str]:
        """Return the head of each running node, by process id."""
        nodes = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if arguments := process.cmdline():
                    nodes[process.pid] = arguments[-1]
            except psutil.NoSuchProcess:
                continue
        return nodes

    def wait_for_nodes(self, *heads: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while list(self.nodes().values()) != list(heads):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{self.nodes()}\n{self.log.read_text()}"
            time.sleep(0.02)


def listen(address: str) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, PORT))
    listener.listen(128)
    return listener


@pytest.fixture
def pod(tmp_path, request):
    pod = TrainerPod(tmp_path, getattr(request, "param", 0.3))
    yield pod
    pod.process.send_signal(signal.SIGTERM)
    assert pod.process.wait(DEADLINE_SECONDS) == 0


@pytest.mark.parametrize("is_reused", [False, True], ids=["old address silent", "old address reused by another Pod"])
def test_node_leaves_the_old_head_and_joins_the_new_one(pod, is_reused):
    old, new = next_address(), next_address()
    listener = listen(old)
    pod.name_head(old)
    pod.wait_for_nodes(old)
    if not is_reused:
        listener.close()
        pod.name_head()
        pod.wait_for_nodes()
    with listener, listen(new):
        pod.name_head(new)
        pod.wait_for_nodes(new)


@pytest.mark.parametrize("pod", [1e6], indirect=True, ids=["however long a silent head is waited for"])
def test_node_leaves_a_head_that_has_ended(pod):
    """Its successor on the same address may listen after a second."""
    head = next_address()
    with listen(head):
        pod.name_head(head)
        pod.wait_for_nodes(head)
    pod.wait_for_nodes()
    assert "leaving the head at" in pod.log.read_text()


def test_node_stays_while_the_head_has_no_address(pod):
    head = next_address()
    with listen(head):
        pod.name_head(head)
        pod.wait_for_nodes(head)
        nodes = pod.nodes()
        pod.name_head()
        deadline = time.monotonic() + 0.8  # eight lookups
        while time.monotonic() < deadline:
            assert pod.nodes() == nodes
            time.sleep(0.05)


class Driver(HTTPServer):
    """The driver of a head: answers once its steps are saved."""

    def __init__(self, address: str) -> None:
        super().__init__((address, PORT_DRIVER + PORT - PORT_RAY), _Answer)
        self.is_asked, self.is_saved, self.requests = threading.Event(), threading.Event(), []


class _Answer(BaseHTTPRequestHandler):
    server: Driver

    def do_POST(self) -> None:
        self.server.requests.append((self.path, self.headers["Authorization"]))
        self.server.is_asked.set()
        self.server.is_saved.wait(DEADLINE_SECONDS)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"step 7 is saved")


def test_pod_that_is_told_to_end_keeps_its_ranks_until_they_are_saved(pod):
    head = next_address()
    with listen(head), Driver(head) as driver:
        threading.Thread(target=driver.serve_forever, daemon=True).start()
        pod.name_head(head)
        pod.wait_for_nodes(head)
        pod.process.send_signal(signal.SIGTERM)
        assert driver.is_asked.wait(DEADLINE_SECONDS), pod.log.read_text()
        assert list(pod.nodes().values()) == [head]
        driver.is_saved.set()
        assert pod.process.wait(DEADLINE_SECONDS) == 0
        driver.shutdown()
    assert driver.requests == [("/rljob/leave", "Bearer secret")]
    assert "the driver: step 7 is saved" in pod.log.read_text()
