from __future__ import annotations

import sys

import grimp
import pytest

import rljob_api
from rljob_api.manifest import job
from rljob_api.read import load
from rljob_api.wire import scores

EXPORTS = {
    *("API_GROUP", "API_VERSION", "__version__"),
    *(
        "RLJob",
        "RLJobSpec",
        "RLJobStatus",
        "Reward",
        "RewardModel",
        "RewardModelSpec",
        "RewardModelStatus",
        "Condition",
    ),
    *("load_job", "load_manifests", "InvalidManifestError", "Problem"),
    *("RLJobError", "UserError", "TransientError"),
    *("ScoreRequest", "ScoreResult", "GroupRequest", "GroupResult", "InvalidReason", "DriverStatus"),
}


def test_public_names_are_pinned():
    assert set(rljob_api.__all__) == EXPORTS == set(dir(rljob_api))
    assert rljob_api.__all__ == sorted(rljob_api.__all__)


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_public_names_can_be_imported(name):
    assert getattr(rljob_api, name) is not None


def test_lazy_exports_are_the_defined_objects():
    assert rljob_api.RLJob is job.RLJob
    assert rljob_api.load_job is load.load_job
    assert rljob_api.ScoreRequest is scores.ScoreRequest


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'RlJob'"):
        rljob_api.RlJob  # noqa: B018


def test_the_api_depends_on_few_packages():
    graph = grimp.build_graph("rljob_api", include_external_packages=True)
    external = {module for module in graph.modules if graph.is_module_squashed(module)}
    tracing = {"aiohttp", "opentelemetry"}  # imported while tracing is on, in programs that require them
    assert external - set(sys.stdlib_module_names) == {"pydantic", "pythonjsonlogger", "re2", "yaml"} | tracing
