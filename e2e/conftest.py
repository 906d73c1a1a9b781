"""One cluster for all tests: started or reused, images loaded, the chart installed, model and data on a claim."""

from __future__ import annotations

import copy
import io
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from harness import CLAIM, LOADER, NAMESPACE, OPERATOR_NAMESPACE, ROOT, Cluster, Job, Manifest, execute, python, say

from rljob_cluster.host.go_programs import find_or_build
from rljob_cluster.host.paths import state_folder

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    context = os.environ.get("E2E_CONTEXT")
    cluster = _find_cluster(context) if context else _start_cluster()
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump(_namespace(NAMESPACE)).encode())
    if cluster.is_local:
        folder = state_folder() / "volumes/e2e"
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)  # a hostPath knows no fsGroup
        python("-m", "rljob_cluster", "volume", CLAIM, folder, "--namespace", NAMESPACE)
    _install(cluster)
    _load_files(cluster)
    return cluster


@pytest.fixture(scope="session")
def submit(cluster: Cluster) -> Callable[..., Job]:
    """Apply job.yaml under a name of its own, with some fields of spec changed."""

    def submit(name: str, **changes: Manifest) -> Job:
        manifest = copy.deepcopy(yaml.safe_load((HERE / "job.yaml").read_text().replace("rljob-e2e", CLAIM)))
        manifest["metadata"] = {"name": name, "namespace": NAMESPACE}
        for field, value in changes.items():
            before = manifest["spec"].get(field)
            manifest["spec"][field] = before | value if isinstance(before, dict) else value
        return Job(cluster, manifest)

    return submit


def _find_cluster(context: str) -> Cluster:
    helm = shutil.which("helm") or str(find_or_build("helm") / "helm")
    return Cluster(("kubectl", "--context", context), (helm, "--kube-context", context), is_local=False)


def _start_cluster() -> Cluster:
    say("building the images that have changed (from nothing: about 10 minutes)")
    python("-m", "rljob_cluster.images", "--loadable")
    say("starting the cluster, or finding it (from nothing: a minute, and 10 to build Kubernetes once)")
    python("-m", "rljob_cluster", "up")
    python("-m", "rljob_cluster", "load")
    programs = find_or_build("kubectl", "helm")
    kubeconfig = execute(sys.executable, "-m", "rljob_cluster", "kubeconfig").decode().strip()
    flag = ("--kubeconfig", kubeconfig)
    return Cluster((str(programs / "kubectl"), *flag), (str(programs / "helm"), *flag), is_local=True)


def _namespace(name: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def _install(cluster: Cluster) -> None:
    say("installing the chart")
    if cluster.is_local:
        python("-m", "rljob_cluster", "install", "--set", "replicas=2")
        return
    execute(
        *cluster.helm_command,
        *("upgrade", "--install", "rljob", ROOT / "charts/rljob", "--namespace", OPERATOR_NAMESPACE),
        *("--create-namespace", "--set", "replicas=2", "--wait", "--timeout", "5m"),
    )


def _load_files(cluster: Cluster) -> None:
    """Model and data onto the claim, through a Pod that stays to read what the jobs write."""
    say("putting model and data on the claim")
    cluster.apply(_loader())
    cluster.kubectl("wait", "-n", NAMESPACE, f"pod/{LOADER}", "--for=condition=Ready", "--timeout=180s")
    python("examples/prepare.py", "tiny")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(ROOT / ".models/tiny-qwen3", "tiny-qwen3")
        for name in ("train.jsonl", "eval.jsonl"):
            tar.add(ROOT / "examples/quickstart/data" / name, name)
    command = ("exec", "-i", "-n", NAMESPACE, LOADER, "--", "tar", "x", "--no-same-owner", "-C", "/claim")
    cluster.kubectl(*command, input=archive.getvalue())


def _loader() -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": LOADER, "namespace": NAMESPACE},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "fsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"rljob.dev/pool": "reward"},
            "containers": [
                {
                    "name": LOADER,
                    "image": "rljob/reward:0.1.0",
                    "command": ["sleep", "infinity"],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "claim", "mountPath": "/claim"}],
                }
            ],
            "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": CLAIM}}],
        },
    }
