"""The control plane of rljob_cluster: version, RBAC, crashes and failed starts of its components."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_cluster.host import go_programs
from rljob_cluster.host.commands import ClusterError

ADDRESS = "127.0.0.1"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane"), address=ADDRESS) as started:
        yield started


def kubectl(kubeconfig: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = go_programs.find_or_build("kubectl") / "kubectl"
    command = [str(program), f"--kubeconfig={kubeconfig}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_server_reports_the_built_version(plane: ControlPlane) -> None:
    answer = kubectl(plane.kubeconfig, "version", "-o", "json")
    assert json.loads(answer.stdout)["serverVersion"]["gitVersion"] == go_programs.KUBERNETES_VERSION, answer.stderr


def test_user_is_refused_until_a_role_is_bound(plane: ControlPlane) -> None:
    bare = plane.kubeconfig_for("ada", ["readers"])
    refused = kubectl(bare, "get", "configmaps")
    assert refused.returncode != 0
    assert 'User "ada" cannot list resource "configmaps"' in refused.stderr
    # Not `view`: an aggregated role stays empty without the controller manager.
    for command in (
        ["clusterrole", "readers", "--verb=list", "--resource=configmaps"],
        ["clusterrolebinding", "readers", "--clusterrole=readers", "--group=readers"],
    ):
        made = kubectl(plane.kubeconfig, "create", *command)
        assert made.returncode == 0, made.stderr
    deadline = time.monotonic() + 20
    while (answer := kubectl(bare, "get", "configmaps")).returncode != 0:
        assert time.monotonic() < deadline, f"the binding never took effect: {answer.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kube-apiserver", "etcd"])
def test_stored_objects_survive_a_killed_component(plane: ControlPlane, name: str) -> None:
    made = kubectl(plane.kubeconfig, "create", "configmap", f"kept-{name}", "--from-literal=a=b")
    assert made.returncode == 0, made.stderr
    plane.processes.stop(name, signal.SIGKILL)
    assert not plane.processes.is_running(name)
    plane.restart(name)
    answer = kubectl(plane.kubeconfig, "get", "configmap", f"kept-{name}", "-o", "jsonpath={.data.a}")
    assert answer.stdout == "b", answer.stderr


def test_failed_start_is_reported_with_the_last_log_lines(tmp_path: Path) -> None:
    broken = ControlPlane(tmp_path, address=ADDRESS, extra_arguments={"kube-apiserver": ["--no-such-flag"]})
    with pytest.raises(ClusterError, match=r"kube-apiserver exited during startup(.|\n)*no-such-flag"):
        broken.start()
    assert not broken.processes.is_running("etcd"), "a start that failed left etcd running"


@pytest.mark.slow
def test_components_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        "from rljob_cluster.control_plane.control_plane import ControlPlane\n"
        "plane = ControlPlane(pathlib.Path(sys.argv[1]), components=['etcd', 'kube-apiserver'])\n"
        "plane.start()\n"
        "print(*plane.processes.pids, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=90)
    pids = done.stdout.split()
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 20
    while alive := [pid for pid in pids if _alive(int(pid))]:
        assert time.monotonic() < deadline, f"processes outlived their parent: {alive}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
