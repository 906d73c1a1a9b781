"""CRDs of another version than the operator's: what is older is named, what is newer is no matter."""

import copy

import pytest
import yaml

from rljob_operator.kube.crds import describe_problem
from rljob_operator.kube.resources import REWARD_MODEL, RLJOB
from tests.paths import ROOT

CRDS = ROOT / "crds"


def read(resource):
    return yaml.safe_load((CRDS / f"{resource.plural}.{resource.group}.yaml").read_text())


def schema_of(crd):
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]


@pytest.mark.parametrize("resource", [RLJOB, REWARD_MODEL])
def test_the_crds_of_this_repository_know_everything(resource):
    assert describe_problem(resource, read(resource)) == ""


def test_each_missing_field_is_named_wherever_it_stands():
    crd = read(RLJOB)
    properties = schema_of(crd)
    del properties["spec"]["properties"]["scheduling"]
    del properties["spec"]["properties"]["rewards"]["items"]["properties"]["weight"]
    del properties["status"]["properties"]["conditions"]["items"]["properties"]["reason"]
    words = describe_problem(RLJOB, crd)
    assert "older than this operator" in words
    assert "it has no spec.rewards[].weight, spec.scheduling, status.conditions[].reason; apply" in words


def test_many_missing_fields_are_counted():
    crd = read(RLJOB)
    schema_of(crd)["spec"]["properties"].clear()
    assert " more; apply the files in crds/" in describe_problem(RLJOB, crd)


def test_a_crd_that_knows_more_is_newer():
    crd = copy.deepcopy(read(REWARD_MODEL))
    schema_of(crd)["spec"]["properties"]["later"] = {"type": "string"}
    assert describe_problem(REWARD_MODEL, crd) == ""


def test_a_version_that_is_not_served_is_said():
    crd = read(REWARD_MODEL)
    crd["spec"]["versions"][0]["name"] = "v1"
    assert "does not serve v1alpha1" in describe_problem(REWARD_MODEL, crd)
