"""CRDs that are older or newer than the operator: the difference and the upgrade are reported."""

import pytest

from rljob_api.errors import TransientError
from rljob_core.kube.client import ApiError
from rljob_core.kube.resources import REWARD_MODEL, RLJOB
from rljob_operator.kube.crds import describe_problem, find_crd_problem
from tests.paths import ROOT
from tests.support import fast_yaml


def read(resource):
    return fast_yaml.load((ROOT / "crds" / f"{resource.plural}.{resource.group}.yaml").read_text())


def schema_of(crd):
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]


@pytest.mark.parametrize("resource", [RLJOB, REWARD_MODEL])
def test_crds_of_this_repository_match_the_types(resource):
    assert describe_problem(resource, read(resource)) == ""


def test_older_crd_is_reported_with_every_missing_field():
    crd = read(RLJOB)
    properties = schema_of(crd)
    del properties["spec"]["properties"]["scheduling"]
    del properties["spec"]["properties"]["rewards"]["items"]["properties"]["weight"]
    del properties["status"]["properties"]["conditions"]["items"]["properties"]["reason"]
    assert describe_problem(RLJOB, crd) == (
        "CRD rljobs.rljob.dev is older than this operator: it lacks spec.rewards[].weight, spec.scheduling, "
        "status.conditions[].reason; upgrade the CRDs: helm upgrade, or kubectl apply --server-side -f crds/"
    )


def test_many_missing_fields_are_counted():
    crd = read(RLJOB)
    schema_of(crd)["spec"]["properties"].clear()
    assert " more; upgrade the CRDs" in describe_problem(RLJOB, crd)


def test_newer_crd_is_reported_with_every_unknown_field():
    crd = read(REWARD_MODEL)
    schema_of(crd)["spec"]["properties"]["later"] = {"type": "string"}
    schema_of(crd)["status"]["properties"]["scaling"]["properties"]["later"] = {"type": "string"}
    assert describe_problem(REWARD_MODEL, crd) == (
        "CRD rewardmodels.rljob.dev is newer than this operator, which does not know spec.later, "
        "status.scaling.later; upgrade the operator: helm upgrade"
    )


def test_version_that_is_not_served_is_reported():
    crd = read(REWARD_MODEL)
    crd["spec"]["versions"][0]["name"] = "v1"
    assert "does not serve v1alpha1; upgrade the CRDs" in describe_problem(REWARD_MODEL, crd)


class Api:
    def __init__(self, error=None):
        self.error = error

    async def request(self, method, path):
        if self.error:
            raise self.error
        return fast_yaml.load((ROOT / "crds" / f"{path.rpartition('/')[2]}.yaml").read_text())


async def test_operator_starts_with_matching_crds_or_without_permission_to_read_them(caplog):
    assert await find_crd_problem(Api()) == ""
    assert await find_crd_problem(Api(ApiError(403, "Forbidden", "no"))) == ""
    assert "their version is not checked" in caplog.text


async def test_operator_does_not_start_without_crds_or_api_server():
    problem = await find_crd_problem(Api(ApiError(404, "NotFound", "not found")))
    assert problem.startswith("CRD rljobs.rljob.dev: not found; upgrade the CRDs")
    assert await find_crd_problem(Api(TransientError("no answer"))) == "no answer"
