"""The quickstart as `kubectl apply -k` renders it: a valid job, with paths that run_on_cluster.py fills."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import yaml

from rljob_api.manifest.job import RLJob
from tests.paths import EXAMPLES
from tests.support.modules import load_module

FOLDER = EXAMPLES / "quickstart"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_module(EXAMPLES / "run_on_cluster.py")


def read_patched() -> dict[str, Any]:
    """Apply the patches of the kustomization (add and replace) to rljob.yaml."""
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    manifest: dict[str, Any] = yaml.safe_load((FOLDER / "rljob.yaml").read_text())
    for operation in yaml.safe_load(kustomization["patches"][0]["patch"]):
        *parents, last = operation["path"].lstrip("/").split("/")
        owner: Any = manifest
        for part in parents:
            owner = owner[int(part) if part.isdigit() else part]
        assert (last in owner) == (operation["op"] == "replace"), operation["path"]
        owner[last] = operation["value"]
    return manifest


def test_quickstart_on_a_cluster_is_valid_and_reads_from_the_claim(script: ModuleType) -> None:
    spec = RLJob.model_validate(read_patched()).spec
    assert spec.data.eval is not None
    prefix = "pvc://quickstart/"
    assert spec.model.source == prefix + script.MODEL.name
    for source in (spec.data.train.source, spec.data.eval.source):
        assert (FOLDER / source.removeprefix(prefix)).is_file()
    reference = spec.rewards[0].function and spec.rewards[0].function.config_map_key_ref
    assert reference
    assert (FOLDER / reference.key).is_file()


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ({}, "Pending: its Pods are starting"),
        (
            {"phase": "Pending", "conditions": [{"type": "Running", "status": "False", "message": "waits for a node"}]},
            "Pending: waits for a node",
        ),
        (
            {
                "phase": "Running",
                "progress": {"step": 2, "totalSteps": 18, "reward": 0.5},
                "conditions": [{"type": "Running", "status": "True", "message": "all Pods are ready"}],
            },
            "Running: step 2/18  reward 0.500",
        ),
    ],
)
def test_status_is_described_in_one_line(script: ModuleType, status: dict[str, Any], line: str) -> None:
    assert script.describe(status) == line
