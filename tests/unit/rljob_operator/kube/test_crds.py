"""CRDs that are older or newer than the operator: the difference and the upgrade are reported."""

import pytest

from rljob_api import __version__
from rljob_api.errors import TransientError
from rljob_core.kube.client import ApiError
from rljob_core.kube.resources import POLICY, REWARD_MODEL, RLJOB
from rljob_operator.kube.crds import check_crds, compare_crd, count_minors, find_missing_fields
from tests.paths import ROOT
from tests.support import fast_yaml


def read(resource):
    return fast_yaml.load((ROOT / "crds" / f"{resource.plural}.{resource.group}.yaml").read_text())


def set_version(crd, version):
    crd["metadata"]["annotations"] = {"rljob.dev/version": version} if version else {}


def describe_problem(resource, crd, version=None):
    """Why the operator must not start. `version`: of the CRD; None: it does not name one."""
    set_version(crd, version)
    problem, may_start = compare_crd(resource, crd)
    assert not may_start
    return problem


def schema_of(crd):
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]


@pytest.mark.parametrize("resource", [RLJOB, REWARD_MODEL, POLICY])
def test_crds_of_this_repository_match_the_types(resource):
    assert compare_crd(resource, read(resource)) == ("", True)


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


@pytest.mark.parametrize("version", [None, "0.0.1", "0.4.0", "1.2.0", "new"])
def test_fields_of_an_unknown_or_distant_version_are_refused(version):
    crd = read(REWARD_MODEL)
    schema_of(crd)["spec"]["properties"]["later"] = {"type": "string"}
    problem = describe_problem(REWARD_MODEL, crd, version)
    assert "is newer than this operator" in problem
    assert version is None or f"({version}, operator {__version__})" in problem


@pytest.mark.parametrize("version", ["0.1.9", "0.2.0", "0.2.7", "0.3.0.dev0"])
def test_more_fields_of_a_neighbouring_version_are_tolerated(version):
    crd = read(REWARD_MODEL)
    schema_of(crd)["spec"]["properties"]["later"] = {"type": "string"}
    set_version(crd, version)
    problem, may_start = compare_crd(REWARD_MODEL, crd)
    assert "which does not know spec.later" in problem
    assert may_start
    del schema_of(crd)["status"]["properties"]["image"]
    problem, may_start = compare_crd(REWARD_MODEL, crd)
    assert "it lacks status.image, and has spec.later in addition" in problem
    assert not may_start, "each status would be refused"


PRESERVED = {"x-kubernetes-preserve-unknown-fields": True}
OWN = {"a": {}, "free": PRESERVED, "parts": {"items": {"properties": {}}}, "named": {"additionalProperties": {}}}
MORE = {"properties": {"tempo": {"properties": {"beats": {}}}}}


def test_differences_of_the_schemas():
    own = {"properties": {"spec": {"properties": OWN}}}
    other = OWN | {"parts": {"items": MORE}, "named": {"additionalProperties": MORE}, "mood": {}}
    newer = {"properties": {"spec": {"properties": other}, "status": {"properties": {"later": {}}}}}
    assert find_missing_fields(newer, own) == ["spec.parts[].tempo", "spec.named.*.tempo", "spec.mood", "status.later"]
    assert find_missing_fields(own, newer) == []


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.2.0", 0), ("0.2.9", 0), ("0.3.0.dev0+g1", 1), ("0.1.0", -1), ("1.2.0", None), ("", None), ("x", None)],
)
def test_distance_of_versions(version, expected):
    assert count_minors(version, "0.2.0.dev0") == expected


class Api:
    def __init__(self, error=None, version=None):
        self.error, self.version = error, version

    async def request(self, method, path):
        if self.error:
            raise self.error
        crd = fast_yaml.load((ROOT / "crds" / f"{path.rpartition('/')[2]}.yaml").read_text())
        if self.version:
            set_version(crd, self.version)
            schema_of(crd)["spec"]["properties"]["later"] = {"type": "string"}
        return crd


async def test_operator_starts_with_matching_crds_or_without_permission_to_read_them(caplog):
    assert await check_crds(Api()) == ""
    assert await check_crds(Api(ApiError(403, "Forbidden", "no"))) == ""
    assert "their version is not checked" in caplog.text


async def test_operator_does_not_start_without_crds_or_api_server():
    problem = await check_crds(Api(ApiError(404, "NotFound", "not found")))
    assert problem.startswith("CRD rljobs.rljob.dev: not found; upgrade the CRDs")
    assert await check_crds(Api(TransientError("no answer"))) == "no answer"


async def test_operator_starts_with_crds_of_the_next_minor_version_and_warns(caplog):
    assert await check_crds(Api(version="0.3.0")) == ""
    assert len(caplog.records) == 3
    assert "CRD rljobs.rljob.dev is newer than this operator (0.3.0, operator" in caplog.text
    assert "which does not know spec.later; upgrade the operator" in caplog.text


async def test_operator_does_not_start_with_crds_two_minor_versions_apart():
    assert "which does not know spec.later" in await check_crds(Api(version="0.4.0"))
