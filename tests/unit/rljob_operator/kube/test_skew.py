"""CRDs of a neighbouring version: what is left out when an object is read, what is a problem, what is not written."""

import pytest

from rljob_api.manifest.services.reward import RewardModelStatus
from rljob_core.backend import InvalidOwnerError, UnknownFieldsError
from rljob_operator.kube.manifests import read_model, read_policy
from rljob_operator.kube.skew import NO_SKEW, KindSkew, Skew, count_minors, find_missing_fields

TEMPO = {
    "type": "object",
    "properties": {"beats": {"type": "integer"}, "mood": {"type": "string", "nullable": True}},
}
OWN = {
    "properties": {
        "spec": {
            "properties": {
                "a": {"type": "string"},
                "free": {"x-kubernetes-preserve-unknown-fields": True},
                "parts": {"items": {"properties": {"name": {"type": "string"}}}},
                "named": {"additionalProperties": {"properties": {"name": {"type": "string"}}}},
                "labels": {"additionalProperties": {"type": "string"}},
            }
        },
        "status": {"properties": {"phase": {"type": "string"}, "extra": {"properties": {"x": {}, "y": {}}}}},
    }
}


def extend(schema, path, name, node):
    """Return a copy of a schema with a property in addition."""
    if not path:
        return schema | {"properties": schema.get("properties", {}) | {name: node}}
    first, *rest = path
    return schema | {first: extend(schema[first], rest, name, node)}


SPEC = ("properties", "spec")
NEWER = OWN
for place, added, kind in (
    (SPEC, "tempo", TEMPO),
    (SPEC, "mood", {"type": "string"}),
    (SPEC, "volume", {"type": "integer"}),
    ((*SPEC, "properties", "parts", "items"), "tempo", TEMPO),
    ((*SPEC, "properties", "named", "additionalProperties"), "tempo", TEMPO),
    (("properties", "status"), "later", {"type": "string"}),
):
    NEWER = extend(NEWER, place, added, kind)
SKEW = KindSkew(OWN, NEWER, "0.3.0")


def test_differences_of_the_schemas():
    assert find_missing_fields(NEWER, OWN) == [
        *("spec.parts[].tempo", "spec.named.*.tempo", "spec.tempo", "spec.mood", "spec.volume", "status.later")
    ]
    assert find_missing_fields(OWN, NEWER) == []


def test_null_of_an_unknown_field_is_left_out():
    known = {"a": "x", "free": {"anything": 1}, "labels": {"tempo": "x"}}
    manifest = {"metadata": {"name": "m"}, "spec": known | {"mood": None}}
    assert SKEW.read(manifest) == ({"metadata": {"name": "m"}, "spec": known}, [])


@pytest.mark.parametrize(
    ("spec", "paths"),
    [
        ({"mood": ""}, ["spec.mood"]),
        ({"volume": 3}, ["spec.volume"]),
        ({"tempo": {}}, ["spec.tempo"]),
        ({"tempo": {"beats": 3}}, ["spec.tempo"]),
        ({"tempo": {"beats": 4, "mood": "grim"}}, ["spec.tempo"]),
        ({"parts": [{"name": "a"}, {"name": "b", "tempo": {"beats": 1}}]}, ["spec.parts[1].tempo"]),
        ({"named": {"a": {"tempo": {"beats": 1}}}, "mood": "x"}, ["spec.named.a.tempo", "spec.mood"]),
    ],
)
def test_set_fields_of_the_crd_alone_are_named(spec, paths):
    assert SKEW.read({"spec": spec})[1] == paths


def test_field_that_neither_side_knows_stays_for_the_types_to_refuse():
    assert SKEW.read({"spec": {"unheard": 1}}) == ({"spec": {"unheard": 1}}, [])


def test_status_of_a_newer_operator_is_read_without_its_fields():
    assert SKEW.read({"spec": {}, "status": {"phase": "Running", "later": "x"}}) == (
        {"spec": {}, "status": {"phase": "Running"}},
        [],
    )


def test_status_is_cut_to_what_an_older_crd_stores():
    older = {"properties": {"status": {"properties": {"extra": {"properties": {"x": {}}}}}}}
    status = {"phase": "Running", "extra": {"x": [1, {"free": 2}], "y": 2}}
    assert KindSkew(OWN, older, "0.1.0").cut(status) == {"extra": {"x": [1, {}]}}
    assert NO_SKEW.cut("RLJob", status) is status


def test_cut_status_is_the_one_that_a_later_reconcile_reads():
    older = {"properties": {"status": {"properties": {"replicas": {}}}}}
    skew = Skew({"RewardModel": KindSkew({}, older, "0.1.0")})
    status = RewardModelStatus(replicas=2, ready_replicas=2, image="x")
    stored = skew.as_stored("RewardModel", status)
    assert stored == RewardModelStatus(replicas=2)
    assert skew.as_stored("RewardModel", stored) == stored
    assert NO_SKEW.as_stored("RewardModel", status) is status


def read_stored(**spec):
    manifest = {"metadata": {"name": "m", "uid": "u"}, "spec": {"function": {"inline": "def f(): ..."}} | spec}
    own = {"properties": {"spec": {"properties": {"function": {"x-kubernetes-preserve-unknown-fields": True}}}}}
    return read_model(manifest, Skew({"RewardModel": KindSkew(own, extend(own, SPEC, "tempo", TEMPO), "0.3.0")}))


def test_set_field_of_a_newer_crd_is_a_problem_of_the_object():
    with pytest.raises(
        InvalidOwnerError, match=r"spec\.tempo is a field of RLJob 0\.3\.0, which this operator"
    ) as raised:
        read_stored(tempo={"beats": 5})
    assert raised.value.owner.metadata.uid == "u"
    assert "upgrade the operator (helm upgrade), or remove the field" in str(raised.value)
    with pytest.raises(UnknownFieldsError):  # the CRD was upgraded after the start
        read_stored(unheard=1)


def test_policy_with_a_set_field_of_a_newer_crd_says_so():
    newer = Skew({"RLJobPolicy": KindSkew(OWN, extend(OWN, SPEC, "quota", {"type": "integer"}), "0.3.0")})
    policy, problem = read_policy({"metadata": {"name": "default", "namespace": "ns"}, "spec": {"quota": 1}}, newer)
    assert policy is None
    assert problem.startswith("RLJobPolicy ns/default: spec.quota is a field of RLJob 0.3.0")


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.2.0", 0), ("0.2.9", 0), ("0.3.0.dev0+g1", 1), ("0.1.0", -1), ("1.2.0", None), ("", None), ("x", None)],
)
def test_distance_of_versions(version, expected):
    assert count_minors(version, "0.2.0.dev0") == expected
