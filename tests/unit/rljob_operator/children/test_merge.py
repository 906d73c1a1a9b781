"""The user's Pod template over ours."""

import pytest

from rljob_api.errors import UserError
from rljob_operator.children.merge import merge

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


def test_maps_merge_by_key_and_null_removes_one():
    assert merged({"nodeSelector": {"zone": "b"}})["nodeSelector"] == {"pool": "x", "zone": "b"}
    assert merged({"nodeSelector": {"pool": None}})["nodeSelector"] == {}
    assert "nodeSelector" not in merged({"nodeSelector": None})


def test_containers_merge_by_name_and_new_ones_are_added():
    main, sidecar = merged({"containers": [{"name": "main", "image": "i"}, {"name": "side", "image": "s"}]})[
        "containers"
    ]
    assert (main["command"], main["image"], sidecar["name"]) == (["python"], "i", "side")


def test_a_variable_or_volume_of_the_same_name_takes_the_place_of_ours_whole():
    env = merged({"containers": [{"name": "main", "env": [{"name": "X", "valueFrom": {"fieldRef": {}}}]}]})
    assert env["containers"][0]["env"] == [{"name": "X", "valueFrom": {"fieldRef": {}}}]
    assert merged({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]})["volumes"] == [
        {"name": "v", "hostPath": {"path": "/"}}
    ]


def test_one_volume_may_be_mounted_at_two_places():
    mounts = merged({"containers": [{"name": "main", "volumeMounts": [{"name": "v", "mountPath": "/w"}]}]})
    assert [m["mountPath"] for m in mounts["containers"][0]["volumeMounts"]] == ["/v", "/w"]


def test_tolerations_are_appended_and_commands_replaced():
    assert merged({"tolerations": [{"key": "own"}]})["tolerations"] == [{"key": "gpu"}, {"key": "own"}]
    assert merged({"containers": [{"name": "main", "command": ["sh"]}]})["containers"][0]["command"] == ["sh"]


def test_neither_argument_is_changed():
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
def test_a_template_of_the_wrong_shape_is_refused_with_its_place(spec, message):
    with pytest.raises(UserError, match=message):
        merged(spec)
