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
from harness import (
    CLAIM,
    LOADER,
    NAMESPACE,
    ROOT,
    Cluster,
    Job,
    Manifest,
    execute,
    install,
    log_step,
    python,
)

from rljob_cluster.host.go_programs import find_or_build
from rljob_cluster.host.paths import state_folder

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    context = os.environ.get("E2E_CONTEXT")
    cluster = _find_cluster(context) if context else _start_cluster()
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    if cluster.is_local:
        folder = state_folder() / "volumes/e2e"
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)  # hostPath volumes ignore fsGroup
        python("-m", "rljob_cluster", "volume", CLAIM, folder, "--namespace", NAMESPACE)
    log_step("installing the chart")
    install(cluster)
    _load_files(cluster)
    return cluster


@pytest.fixture(scope="session")
def submit(cluster: Cluster) -> Callable[..., Job]:
    """Apply job.yaml under the given name, with some fields of spec changed; None removes one."""

    def submit(name: str, **changes: Manifest) -> Job:
        manifest = copy.deepcopy(yaml.safe_load((HERE / "job.yaml").read_text().replace("rljob-e2e", CLAIM)))
        manifest["metadata"] = {"name": name, "namespace": NAMESPACE}
        for field, value in changes.items():
            before = manifest["spec"].pop(field, None)
            if value is None:
                continue
            if isinstance(before, dict):
                value = {name: each for name, each in (before | value).items() if each is not None}
            manifest["spec"][field] = value
        return Job(cluster, manifest)

    return submit


def _find_cluster(context: str) -> Cluster:
    helm = shutil.which("helm") or str(find_or_build("helm") / "helm")
    return Cluster(("kubectl", "--context", context), (helm, "--kube-context", context), is_local=False)


def _start_cluster() -> Cluster:
    log_step("building the images that have changed (the first time: about 10 minutes)")
    python("-m", "rljob_cluster.images", "--loadable")
    log_step("starting the cluster unless it runs (1 minute; the first time, 10 more to build Kubernetes)")
    python("-m", "rljob_cluster", "up")
    python("-m", "rljob_cluster", "load")
    programs = find_or_build("kubectl", "helm")
    flag = ("--kubeconfig", execute(sys.executable, "-m", "rljob_cluster", "kubeconfig").decode().strip())
    return Cluster((str(programs / "kubectl"), *flag), (str(programs / "helm"), *flag), is_local=True)


def _load_files(cluster: Cluster) -> None:
    """Put model and data on the claim, through a Pod that stays to read what the jobs write."""
    log_step("putting model and data on the claim")
    loader = (HERE / "loader.yaml").read_text().replace("rljob-e2e", CLAIM)
    cluster.kubectl("apply", "-n", NAMESPACE, "--server-side", "-f", "-", input=loader.encode())
    cluster.kubectl("wait", "-n", NAMESPACE, f"pod/{LOADER}", "--for=condition=Ready", "--timeout=180s")
    python("examples/prepare.py", "tiny")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(ROOT / ".models/tiny-qwen3", "tiny-qwen3")
        for name in ("train.jsonl", "eval.jsonl"):
            tar.add(ROOT / "examples/quickstart/data" / name, name)
    cluster.unpack_on_claim(archive.getvalue())
