"""RLJob's operator as a subject: jobs of seven Pods, and their drivers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml

from operator_load.measure import Subject
from operator_load.operator_process import Command
from operator_load.plane import NAMESPACE
from rljob_api.wire.contract import LABEL_JOB, PORT_DRIVER
from rljob_cluster.control_plane.control_plane import ControlPlane, free_port
from rljob_core.kube.resources import RLJOB

ROOT = Path(__file__).resolve().parents[2]
CRDS = ROOT / "crds"
PODS_PER_JOB = 7
_JOB = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
spec:
  model: {source: /models/tiny}
  data: {train: {source: /data/train.parquet}}
  rewards:
  - name: correct
    replicas: 2
    function:
      inline: |
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return 1.0
  trainer: {replicas: 2, gpusPerReplica: 0}
  rollout: {replicas: 2, gpusPerReplica: 0}
"""


def build_subject(plane: ControlPlane) -> Subject:
    metrics, health = free_port("127.0.0.1"), free_port("127.0.0.1")
    arguments = [sys.executable, "-m", "rljob_operator", f"--kubeconfig={plane.kubeconfig}"]
    arguments += [f"--lease-namespace={NAMESPACE}", f"--metrics-port={metrics}", f"--health-port={health}"]
    urls = [f"http://127.0.0.1:{metrics}/metrics", f"http://127.0.0.1:{health}/healthz"]
    return Subject(
        command=Command("rljob", [*arguments, "--log-level=warning"], *urls, f"http://127.0.0.1:{health}/readyz"),
        path=RLJOB.path(NAMESPACE),
        body=yaml.safe_load(_JOB),
        label=LABEL_JOB,
        pods_per_object=PODS_PER_JOB,
        column="phase",
        running="running",
        requests=("rljob_operator_api_calls_total", "verb"),
        reconciles="rljob_operator_reconcile_seconds",
        reconcile_labels={"kind": "RLJob"},
        leader="rljob_operator_is_leader",
        depth="rljob_operator_queue_depth",
        lease="rljob-operator",
    )


@contextlib.contextmanager
def run_drivers(hung_share: float, log: Path) -> Iterator[None]:
    """Run the drivers of all jobs in one process. No other process may listen on their port."""
    command = [sys.executable, "-m", "operator_load.drivers", str(PORT_DRIVER), str(hung_share)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "bench")}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def count_answers() -> dict[str, int]:
    def read() -> dict[str, int]:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT_DRIVER}/counts", timeout=10) as answer:
            return dict(json.load(answer))

    return await asyncio.to_thread(read)
