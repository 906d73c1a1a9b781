"""The node affinity against broken GPUs, next to the affinity of a user's template."""

from rljob_core.children.pods import avoid_nodes, avoided_by

BY_NAME = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1", "n2"]}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def terms_of(spec):
    return spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]


def test_pods_without_broken_gpus_stay_as_they_are():
    spec = {"containers": []}
    assert avoid_nodes(spec, []) is spec
    assert avoided_by(spec) == []


def test_nodes_are_avoided_by_name():
    spec = avoid_nodes({"containers": []}, ["n2", "n1"])
    assert terms_of(spec) == [{"matchExpressions": [BY_NAME]}]
    assert avoided_by(spec) == ["n1", "n2"]


def test_every_alternative_of_the_users_template_avoids_the_nodes():
    zones = [{"key": "zone", "operator": "In", "values": ["a"]}], [{"key": "zone", "operator": "In", "values": ["b"]}]
    node = {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": zone} for zone in zones]}}
    anti = {"requiredDuringSchedulingIgnoredDuringExecution": []}
    spec = avoid_nodes({"affinity": {"nodeAffinity": node, "podAntiAffinity": anti}}, ["n1", "n2"])
    assert terms_of(spec) == [{"matchExpressions": [*zone, BY_NAME]} for zone in zones]
    assert spec["affinity"]["podAntiAffinity"] == anti
    assert terms_of({"affinity": {"nodeAffinity": node}}) == [{"matchExpressions": zone} for zone in zones], "a copy"
