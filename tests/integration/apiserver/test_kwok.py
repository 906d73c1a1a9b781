"""KWOK on the control plane: the scheduler places a Pod on a fake node, and it becomes Ready."""

import subprocess
from pathlib import Path

import pytest

from rljob_cluster.control_plane.control_plane import COMPONENTS, ControlPlane
from rljob_cluster.control_plane.kwok import run_kwok
from rljob_cluster.host import go_programs

POD = """
apiVersion: v1
kind: Pod
metadata: {name: fake}
spec:
  nodeSelector: {pool: rollout}
  containers: [{name: main, image: none.invalid/none}]
"""


@pytest.mark.slow
def test_pod_becomes_ready_on_a_fake_node(tmp_path: Path) -> None:
    with (
        ControlPlane(tmp_path, components=COMPONENTS) as plane,
        run_kwok(plane, num_nodes=3, labels={"pool": "rollout"}),
    ):
        program = str(go_programs.find_or_build("kubectl") / "kubectl")

        def kubectl(*arguments: str, text: str | None = None) -> str:
            command = [program, f"--kubeconfig={plane.kubeconfig}", *arguments]
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            return done.stdout

        # Only the controller manager makes the account that a Pod needs.
        kubectl("wait", "--for=create", "serviceaccount/default", "--timeout=30s")
        kubectl("apply", "-f", "-", text=POD)
        kubectl("wait", "--for=condition=Ready", "pod/fake", "--timeout=30s")
        assert kubectl("get", "pod", "fake", "-o", "jsonpath={.spec.nodeName}").startswith("kwok-")
