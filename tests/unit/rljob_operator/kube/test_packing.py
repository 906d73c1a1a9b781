"""Packed objects: whole, small, and within a bounded number of dictionaries."""

import json

from rljob_operator.kube.packing import MAX_DICTIONARIES, Packer, unpack


def build_pod(index, role="rollout"):
    env = [{"name": f"VARIABLE_{number}", "value": f"value {number}"} for number in range(40)]
    return {
        "metadata": {"name": f"pod-{index}", "uid": f"uid-{index}", "labels": {"rljob.dev/role": role}},
        "spec": {"containers": [{"name": "main", "env": env}]},
    }


def test_packed_object_is_returned_whole_with_the_fields_of_own_applies_only():
    packer = Packer()
    own = {"manager": "rljob-operator", "operation": "Apply", "fieldsV1": {"f:spec": {}}}
    others = [{"manager": "kubelet", "operation": "Update"}, own | {"subresource": "status"}]
    for index in range(3):
        pod = build_pod(index)
        packed = packer.pack("Pod", pod | {"metadata": pod["metadata"] | {"managedFields": others}})
        assert unpack(packed) == pod
        packed = packer.pack("Pod", pod | {"metadata": pod["metadata"] | {"managedFields": [*others, own]}})
        assert unpack(packed)["metadata"]["managedFields"] == [own]


def test_objects_of_one_kind_and_role_take_a_tenth_of_their_json():
    packer = Packer()
    packed = [packer.pack("Pod", build_pod(index, role)) for role in ("rollout", "head") for index in range(3)]
    for data, _ in packed:
        assert len(data) < len(json.dumps(build_pod(0))) / 10
    assert len({id(dictionary) for _, dictionary in packed}) == 2, "shared, not copied"


def with_status(pod, num=40):
    return pod | {"status": {"conditions": [{"type": f"Type{number}", "status": "True"} for number in range(num)]}}


def test_later_version_of_the_first_object_is_the_dictionary_of_the_others():
    packer = Packer()
    sizes = []
    for first in (build_pod(0), with_status(build_pod(0))):
        packer.pack("Pod", first)
        packed = packer.pack("Pod", with_status(build_pod(1)))
        assert unpack(packed) == with_status(build_pod(1))
        sizes.append(len(packed[0]))
    assert sizes[1] < sizes[0] / 2, "it has a status, too"


def test_one_object_or_another_cannot_make_any_number_of_dictionaries():
    packer = Packer()
    first = packer.pack("Pod", build_pod(0))[1]
    assert packer.pack("Pod", with_status(build_pod(1), 400))[1] is first, "another object's is not used"
    longer = [packer.pack("Pod", with_status(build_pod(0), number))[1] for number in range(400)]
    assert len({id(dictionary) for dictionary in longer}) < 80


def test_number_of_dictionaries_is_bounded():
    packer = Packer()
    packed = [packer.pack("Pod", build_pod(0, role=f"role-{number}")) for number in range(MAX_DICTIONARIES + 5)]
    assert sum(bool(dictionary) for _, dictionary in packed) == MAX_DICTIONARIES
    assert unpack(packed[-1]) == build_pod(0, role=f"role-{MAX_DICTIONARIES + 4}")


def test_an_object_that_is_deeper_than_parsers_take_stops_nothing():
    value = 1
    for _ in range(500):
        value = {"a": value}
    found = unpack(Packer().pack("Pod", {**build_pod(0), "spec": value}))
    assert found["metadata"] == build_pod(0)["metadata"]
    assert found["spec"]["a"]["a"]
