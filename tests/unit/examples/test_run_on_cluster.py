"""The quickstart as `kubectl apply -k` makes it: a valid job, on paths that run_on_cluster.py fills."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest
import yaml

from rljob_api.manifest.job import RLJob
from tests.paths import ROOT

EXAMPLES = ROOT / "examples"
FOLDER = EXAMPLES / "quickstart"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_on_cluster", EXAMPLES / "run_on_cluster.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_patched() -> dict[str, Any]:
    """What kustomize makes of rljob.yaml, as far as this file's patches (add and replace) need it."""
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


def test_the_quickstart_on_a_cluster_is_a_valid_job_with_all_its_sources_on_the_claim(script: ModuleType) -> None:
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
        ({}, "Pending: its Pods start"),
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
def test_a_status_is_told_in_one_line(script: ModuleType, status: dict[str, Any], line: str) -> None:
    assert script.describe(status) == line
