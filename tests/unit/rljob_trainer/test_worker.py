"""The trainer Pod's program: what it starts a node with, and that it leaves nothing behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rljob_api.errors import UserError
from rljob_trainer.process_tree import descendants
from rljob_trainer.worker import ENV_NUM_THREADS, build_command, build_environment, read_environment

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
from rljob_trainer.process_tree import descendants
from rljob_trainer.worker import adopt_orphans, end_descendants
import os
adopt_orphans()
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {{deaf!r}}], start_new_session=True)"
child = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
child.stdout.readline()
child.wait()
print(*descendants(os.getpid()), flush=True)
end_descendants(0.1)
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
