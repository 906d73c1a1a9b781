"""Paths of the API server's answers in the manifest that it answered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.read.documents import format_path
from rljob_core.plan.rejections import find_location

PORTS = [{"containerPort": 1}, {"containerPort": 2, "protocol": "UDP"}]
LIMITS = {"nvidia.com/gpu": 1}
MAIN = {"name": "main", "env": [{"name": "A"}], "ports": PORTS, "resources": {"limits": LIMITS}}
POD = {"containers": [{"name": 'a"b.c]'}, MAIN], "nodeSelector": {}}
WORKLOAD = {"spec": {"template": {"metadata": {"labels": {"a": "b"}}, "spec": POD}}}
CONTAINER = ("spec", "template", "spec", "containers", 1)


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("spec.template.spec.containers[1].image", (*CONTAINER, "image")),
        (
            "spec.template.spec.containers[1].resources.limits[nvidia.com/gpu]",
            (*CONTAINER, "resources", "limits", "nvidia.com/gpu"),
        ),
        ("spec.template.labels", ("spec", "template", "metadata", "labels")),
        ("spec.template.spec.nodeSelectr", ("spec", "template", "spec", "nodeSelectr")),
        ("spec.template.spec.containers.env.value", ("spec", "template", "spec", "containers")),
        ("spec.template.spec.containers[7].image", ("spec", "template", "spec", "containers")),
        ("", ()),
    ],
)
def test_path_is_the_location_in_the_manifest(path, location):
    assert find_location(WORKLOAD, path) == location


@given(st.text() | st.lists(st.sampled_from([*'abc.[]"=,\\0', "spec", "template", "containers", "name"])).map("".join))
def test_every_path_has_a_location_whose_holders_exist(path):
    value = WORKLOAD
    location = find_location(WORKLOAD, path)
    assert format_path(location) is not None
    for part in location[:-1]:
        value = value[part] if isinstance(value, list) else value.get(part)
        assert value is not None
