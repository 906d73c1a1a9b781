"""The merge of the user's Pod template."""

import pytest

from rljob_api.errors import UserError
from rljob_core.children.merge import find_in_patch, merge

BASE = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "containers": [
            {
                "name": "main",
                "command": ["python"],
                "env": [{"name": "X", "value": "1"}],
                "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            }
        ],
        "tolerations": [{"key": "gpu"}],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "nodeSelector": {"pool": "x"},
    },
}


def merged(spec):
    return merge(BASE, {"spec": spec}, "spec.head.template")["spec"]


def test_maps_merge_by_key_and_null_deletes_one():
    assert merged({"nodeSelector": {"zone": "b"}})["nodeSelector"] == {"pool": "x", "zone": "b"}
    assert merged({"nodeSelector": {"pool": None}})["nodeSelector"] == {}
    assert "nodeSelector" not in merged({"nodeSelector": None})


def test_containers_merge_by_name_and_new_ones_are_added():
    main, sidecar = merged({"containers": [{"name": "main", "image": "i"}, {"name": "side", "image": "s"}]})[
        "containers"
    ]
    assert (main["command"], main["image"], sidecar["name"]) == (["python"], "i", "side")


def test_variable_or_volume_with_the_same_name_is_replaced():
    env = merged({"containers": [{"name": "main", "env": [{"name": "X", "valueFrom": {"fieldRef": {}}}]}]})
    assert env["containers"][0]["env"] == [{"name": "X", "valueFrom": {"fieldRef": {}}}]
    assert merged({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]})["volumes"] == [
        {"name": "v", "hostPath": {"path": "/"}}
    ]


def test_volume_may_be_mounted_twice():
    mounts = merged({"containers": [{"name": "main", "volumeMounts": [{"name": "v", "mountPath": "/w"}]}]})
    assert [m["mountPath"] for m in mounts["containers"][0]["volumeMounts"]] == ["/v", "/w"]


def test_tolerations_are_appended_and_commands_replaced():
    assert merged({"tolerations": [{"key": "own"}]})["tolerations"] == [{"key": "gpu"}, {"key": "own"}]
    assert merged({"containers": [{"name": "main", "command": ["sh"]}]})["containers"][0]["command"] == ["sh"]


def test_merge_does_not_change_its_arguments():
    before = repr(BASE)
    merged({"containers": [{"name": "main", "env": [{"name": "Y", "value": "2"}]}], "nodeSelector": {"pool": None}})
    assert repr(BASE) == before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"containers": {"name": "x"}}, "spec.head.template.spec.containers must be a list, got dict"),
        ({"containers": [{}]}, r"spec.head.template.spec.containers\[0\] must be a mapping with name"),
        ({"nodeSelector": ["x"]}, "spec.head.template.spec.nodeSelector must be a mapping, got list"),
    ],
)
def test_malformed_template_is_rejected_with_its_path(spec, message):
    with pytest.raises(UserError, match=message):
        merged(spec)


@pytest.mark.parametrize(
    ("location", "found"),
    [
        (("metadata", "labels", "a"), ("metadata", "labels", "a")),
        (("metadata", "labels", "built"), ("metadata", "labels")),
        (("spec", "containers", 1, "env", 1, "value"), ("spec", "containers", 0, "env", 0, "value")),
        (("spec", "containers", 0, "image"), ("spec", "containers")),
        (("spec", "containers", 1, "args", 1), ("spec", "containers", 0, "args", 1)),
        (("spec", "tolerations", 1, "key"), ("spec", "tolerations", 0, "key")),
        (("spec", "tolerations", 0, "key"), ("spec", "tolerations")),
    ],
)
def test_place_in_the_merged_template_is_found_in_the_patch(location, found):
    base = {
        "metadata": {"labels": {"built": "x"}},
        "spec": {
            "containers": [{"name": "built"}, {"name": "main", "env": [{"name": "A", "value": "1"}]}],
            "tolerations": [{"key": "built"}],
        },
    }
    main = {"name": "main", "env": [{"name": "B", "value": "2"}], "args": ["x", "y"]}
    patch = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [main], "tolerations": [{"key": "own"}]}}
    assert find_in_patch(merge(base, patch, "template"), patch, location) == found
