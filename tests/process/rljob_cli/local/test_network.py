"""Jobs on a machine whose other programs listen on all of RLJob's ports. In a separate network,
because a listener on 0.0.0.0:8080 would stop other tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rljob_cli.main import app
from tests.support.model_folder import write_model

OWN_NETWORK = ["unshare", "--user", "--map-root-user", "--net"]
"""Its loopback interface is down."""

BUSY_MACHINE = """
import fcntl, socket, struct, subprocess, sys
from rljob_api.wire.contract import PORTS
SIOCSIFFLAGS, UP_LOOPBACK_RUNNING = 0x8914, 0x49
listeners = []
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", UP_LOOPBACK_RUNNING))
for number, port in enumerate(PORTS):
    listeners.append(socket.create_server(("127.0.0.1" if number % 2 else "0.0.0.0", port)))
sys.exit(subprocess.run([sys.executable, "-m", "rljob_cli.main", *sys.argv[1:]]).returncode)
"""


def can_have_a_network():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*OWN_NETWORK, "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_have_a_network(), reason="needs user and network namespaces")


def run_on_a_busy_machine(*arguments):
    command = [*OWN_NETWORK, sys.executable, "-c", BUSY_MACHINE, *map(str, arguments), "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def init(folder, *options):
    done = CliRunner().invoke(app, ["init", str(folder), *map(str, options)])
    assert done.exit_code == 0, done.output
    return folder / "rljob.yaml"


def test_rewards_are_served_when_all_ports_are_taken(tmp_path):
    job = init(tmp_path / "job")
    [result] = run_on_a_busy_machine("test-reward", job, "--completion", "5", "--answer", "5")["results"]
    assert result["valid"], result


def test_programs_reach_the_gateway_when_all_ports_are_taken(tmp_path):
    model = write_model(tmp_path / "model", {"max_position_embeddings": 4096})
    job = init(tmp_path / "job", "--agent", "program", "--model", model)
    sizes = ["spec.rollout.maxModelLen=4096", "spec.rollout.sampling.maxTokens=512"]
    settings = [part for each in (*sizes, "spec.agent.runner.function.requirements=[]") for part in ("--set", each)]
    found = run_on_a_busy_machine("test-agent", job, "--completion", "1", *settings)
    assert found["episodes"][0]["turns"], found
