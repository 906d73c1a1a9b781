"""KubeRay's operator as a subject, built from its source: RayClusters with as many Pods as a job.

As shipped: one reconcile at a time, 100 requests per second with bursts of 200, no gang scheduler, no webhooks. Its
module is not at Go's proxy under its versions, so a git repository is the source.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from operator_load.measure import Subject
from operator_load.operator_process import Command
from operator_load.plane import CONSOLE, NAMESPACE
from rljob_cluster.control_plane.control_plane import ControlPlane, free_port
from rljob_cluster.host.go_programs import go_command
from rljob_cluster.host.paths import cache_root

VERSION = "v1.7.0"
SOURCE = "https://github.com/ray-project/kuberay"
_FOLDER = "ray-operator"
_CLUSTER = """
apiVersion: ray.io/v1
kind: RayCluster
spec:
  rayVersion: "2.52.0"
  headGroupSpec:
    rayStartParams: {}
    template: &pod
      spec:
        containers:
        - name: ray
          image: rayproject/ray:2.52.0
          resources: {requests: {cpu: 100m, memory: 128Mi}, limits: {cpu: "1", memory: 1Gi}}
  workerGroupSpecs:
  - groupName: workers
    replicas: 0
    minReplicas: 0
    maxReplicas: 100
    rayStartParams: {}
    template: *pod
"""


def find_or_build(source: str) -> Path:
    """Return a folder with the program `operator` and the CRDs `crds/*.yaml`. Builds them once."""
    folder = cache_root() / f"kuberay-{VERSION}"
    if (folder / "operator").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        code = _fetch(source, Path(temporary)) / _FOLDER
        CONSOLE.log(f"kuberay: builds {VERSION} (once; kept in {folder})")
        built = Path(temporary) / "built"
        shutil.copytree(code / "config/crd/bases", built / "crds")
        build = [*go_command(), "build", "-trimpath", "-ldflags", "-s -w", "-o", str(built / "operator"), "."]
        _run(build, cwd=code, env=os.environ | {"CGO_ENABLED": "0"})
        os.replace(built, folder)
    return folder


def _fetch(source: str, folder: Path) -> Path:
    """Take the operator's code out of a local repository, or clone it."""
    CONSOLE.log(f"kuberay: takes {VERSION} from {source}")
    target = folder / "source"
    if not Path(source).is_dir():
        _run(["git", "clone", "--quiet", "--depth=1", f"--branch={VERSION}", source, str(target)])
        return target
    target.mkdir()
    archive = folder / "source.tar"
    _run(["git", "-C", source, "archive", f"--output={archive}", VERSION, _FOLDER])
    _run(["tar", "-xf", str(archive), "-C", str(target)])
    return target


def _run(command: Sequence[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:4])} failed:\n{done.stderr[-1500:]}")


def build_subject(plane: ControlPlane, program: Path, num_pods: int, arguments: Sequence[str] = ()) -> Subject:
    metrics, health = free_port("127.0.0.1"), free_port("127.0.0.1")
    body = yaml.safe_load(_CLUSTER)
    body["spec"]["workerGroupSpecs"][0] |= {"replicas": num_pods - 1, "minReplicas": num_pods - 1}
    addresses = [f"--metrics-addr=127.0.0.1:{metrics}", f"--health-probe-bind-address=127.0.0.1:{health}"]
    lease = [f"--leader-election-namespace={NAMESPACE}", "--zap-log-level=error"]
    return Subject(
        command=Command(
            "kuberay",
            [str(program), *addresses, *lease, *arguments],
            f"http://127.0.0.1:{metrics}/metrics",
            f"http://127.0.0.1:{health}/healthz",
            f"http://127.0.0.1:{health}/readyz",
            {"KUBECONFIG": str(plane.kubeconfig)},
        ),
        path=f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters",
        body=body,
        label="ray.io/cluster",
        pods_per_object=num_pods,
        column="status",
        running="ready",
        requests=("rest_client_requests_total", "method"),
        reconciles="controller_runtime_reconcile_time_seconds",
        reconcile_labels={"controller": "raycluster"},
        leader="leader_election_master_status",
        depth="workqueue_depth",
        lease="ray-operator-leader",
    )
