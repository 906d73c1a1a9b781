"""The trainer Pod's program: what it starts a node with, and that it leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rljob_api.errors import UserError
from rljob_trainer.ranks.process_setup import ENV_NUM_THREADS
from rljob_trainer.ranks.process_tree import descendants
from rljob_trainer.worker.main import build_command, build_environment, read_environment

DEADLINE_SECONDS = 20

JOB = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "pods"},
    "spec": {
        "model": {"source": "/model"},
        "data": {"train": {"source": "/data.jsonl"}},
        "rewards": [{"name": "r", "function": {"inline": "def compute_score(): ..."}}],
        "trainer": {"replicas": 2, "gpusPerReplica": 4},
    },
}


def environment_values(folder: Path) -> dict[str, str]:
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    return {"RLJOB_POD_IP": "127.14.9.2", "RLJOB_HEAD": "head", "RLJOB_JOB_FILE": str(folder / "job.yaml")}


def test_a_pod_offers_one_rank_a_gpu_and_no_cpus(tmp_path):
    environment = read_environment(environment_values(tmp_path))
    command = build_command(environment, "127.14.9.1", tmp_path)
    assert '--resources={"rljob-trainer": 4}' in command
    assert "--num-gpus=4" in command
    assert "--num-cpus=0" in command, "Ray would place work of its own there"
    assert "--node-ip-address=127.14.9.2" in command


def test_what_the_operator_forgot_is_named(tmp_path):
    with pytest.raises(UserError, match="RLJOB_HEAD must be set"):
        read_environment({**environment_values(tmp_path), "RLJOB_HEAD": ""})


def test_the_users_number_of_threads_gets_past_ray():
    assert build_environment({"OMP_NUM_THREADS": "3"})[ENV_NUM_THREADS] == "3"
    assert ENV_NUM_THREADS not in build_environment({})


def test_every_descendant_ends_even_one_whose_parent_is_gone_and_one_that_ignores_sigterm(tmp_path):
    program = f"""
import subprocess, sys, time
sys.path[:0] = {sys.path!r}
from rljob_trainer.ranks.process_tree import descendants
from rljob_trainer.worker.main import adopt_orphans, terminate_descendants
import os
adopt_orphans()
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {{deaf!r}}], start_new_session=True)"
child = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
child.stdout.readline()
child.wait()
print(*descendants(os.getpid()), flush=True)
terminate_descendants(0.1)
print("left:", *descendants(os.getpid()), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    found, left = done.stdout.splitlines()
    assert found, "the orphan must be found"
    assert left == "left:"
    assert not any(Path(f"/proc/{process}").exists() for process in found.split())


def test_descendants_are_found_at_every_depth():
    child = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(descendants(child.pid)) < 1:
            assert time.monotonic() < deadline
        assert {child.pid, *descendants(child.pid)} <= set(descendants(os.getpid()))
    finally:
        for process in descendants(child.pid):
            os.kill(process, 9)
        child.wait()


class TrainerPod:
    """The worker's program, with a process that sleeps where Ray's node would be."""

    def __init__(self, folder: Path) -> None:
        self.hosts, self.log = folder / "hosts", folder / "log"
        self.hosts.write_text("")
        program = """
import sys
from rljob_trainer import worker
worker._LOOK_UP_SECONDS = 0.2
worker._HEAD_GONE_SECONDS = 0.5
worker.build_command = lambda environment, head, folder: [sys.executable, "-c", "import time; time.sleep(600)", head]
sys.exit(worker.main())
"""
        values = environment_values(folder) | {"RLJOB_HOSTS_FILE": str(self.hosts), "RLJOB_RAY_PORT": "23791"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program], env={**os.environ, **values}, stdout=log, stderr=log
            )

    def name_head(self, *addresses: str) -> None:
        new = self.hosts.with_suffix(".new")
        new.write_text("".join(f"{address} head\n" for address in addresses))
        new.replace(self.hosts)

    def nodes(self) -> list[str]:
        """The heads that the living nodes were started for."""
        lines = [Path(f"/proc/{process}/cmdline") for process in descendants(self.process.pid)]
        return [line.read_text().split("\0")[-2] for line in lines if line.exists() and line.read_text()]

    def wait_for_nodes(self, *heads: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.nodes() != list(heads):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{self.nodes()}\n{self.log.read_text()}"
            time.sleep(0.02)


def listen(address: str) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, 23791))
    listener.listen(128)
    return listener


@pytest.fixture
def pod(tmp_path):
    pod = TrainerPod(tmp_path)
    yield pod
    pod.process.send_signal(signal.SIGTERM)
    assert pod.process.wait(DEADLINE_SECONDS) == 0


@pytest.mark.parametrize("old_address_answers", [False, True], ids=["silent", "reused by another Pod"])
def test_a_node_leaves_the_old_head_and_joins_the_one_that_the_name_has_now(pod, old_address_answers):
    old = listen("127.35.1.1")
    pod.name_head("127.35.1.1")
    pod.wait_for_nodes("127.35.1.1")
    if not old_address_answers:
        old.close()
        pod.name_head()
        pod.wait_for_nodes()
    with old, listen("127.35.1.2"):
        pod.name_head("127.35.1.2")
        pod.wait_for_nodes("127.35.1.2")


def test_a_node_stays_while_the_name_has_no_address(pod):
    with listen("127.35.1.3"):
        pod.name_head("127.35.1.3")
        pod.wait_for_nodes("127.35.1.3")
        [node] = descendants(pod.process.pid)
        pod.name_head()
        deadline = time.monotonic() + 2  # ten look-ups
        while time.monotonic() < deadline:
            assert descendants(pod.process.pid) == [node]
            time.sleep(0.05)
