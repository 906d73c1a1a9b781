"""What admission made of an applied object, and what others edited in it."""

import copy
import json

import pytest

from rljob_core.children.difference import contains, find_own_entry, keep_admitted, stamp
from rljob_core.children.keep import record_built

CONTAINER = {
    "name": "a",
    "image": "org/image",
    "args": ["x", "y"],
    "env": [{"name": "X", "value": "1"}, {"name": "Y", "value": "2"}],
    "ports": [{"containerPort": 80}],
    "resources": {"requests": {"cpu": "0.5"}},
}


def build(kind="Deployment", **spec):
    spec = {"replicas": 1, "template": {"spec": {"containers": [CONTAINER]}}} | spec
    manifest = {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": "n", "labels": {"l": "1"}}, "spec": spec}
    return stamp(record_built(manifest))


def own(value):
    """FieldsV1 of a manifest, as the API server writes them."""
    if isinstance(value, dict):
        return {f"f:{name}": own(inner) for name, inner in value.items()}
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return {}
    return {f"k:{json.dumps(key_of(item))}": {".": {}} | own(item) for item in value}


def key_of(item):
    return {"name": item["name"]} if "name" in item else {"containerPort": item["containerPort"], "protocol": "TCP"}


def store(manifest):
    """The manifest as the API server stores it, without admission."""
    stored = copy.deepcopy(manifest)
    fields = {"f:metadata": own(manifest["metadata"]), "f:spec": own(manifest["spec"])}
    entry = {"manager": "rljob-operator", "operation": "Apply", "fieldsV1": fields}
    stored["metadata"]["managedFields"] = [{"manager": "kubectl", "operation": "Update", "fieldsV1": {}}, entry]
    container_of(stored)["ports"][0]["protocol"] = "TCP"
    return stored


def container_of(manifest):
    return manifest["spec"]["template"]["spec"]["containers"][0]


def disown(stored, *path):
    """As an update by others: what has no field left is removed, too."""
    fields = find_own_entry(stored["metadata"]["managedFields"])["fieldsV1"]
    _remove(fields, ("f:spec", "f:template", "f:spec", "f:containers", 'k:{"name": "a"}', *path))


def _remove(fields, path):
    if len(path) > 1:
        _remove(fields[path[0]], path[1:])
    if len(path) == 1 or not fields[path[0]]:
        del fields[path[0]]


CHANGES = {
    "a value": (lambda c: c.update(image="mirror/image"), ("f:image",)),
    "a whole list": (lambda c: c.update(args=["z"]), ("f:args",)),
    "a value of an item": (lambda c: c["env"][0].update(value="9"), ("f:env", 'k:{"name": "X"}', "f:value")),
    "an item": (lambda c: c["env"].pop(1), ("f:env", 'k:{"name": "Y"}')),
    "a quantity": (lambda c: c["resources"].update(requests={"cpu": "3"}), ("f:resources", "f:requests", "f:cpu")),
    "a missing field": (lambda c: c.pop("args"), ("f:args",)),
    "an item with a default in its key": (
        lambda c: c.pop("ports"),
        ("f:ports", 'k:{"containerPort": 80, "protocol": "TCP"}'),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_admission_changed_is_kept_and_what_others_changed_is_not(name):
    change, path = CHANGES[name]
    desired = build()
    stored = store(desired)
    change(container_of(stored))
    assert not contains(stored, desired)
    assert contains(stored, keep_admitted(desired, stored)), "the field is the operator's: admission changed it"
    disown(stored, *path)
    assert keep_admitted(desired, stored) == desired, "the field is another's: it is set back"


def test_only_an_unchanged_manifest_keeps_what_admission_made_of_it():
    stored = store(build())
    container_of(stored)["image"] = "mirror/image"
    stored["metadata"]["labels"]["l"] = "policy"
    scaled = keep_admitted(build(replicas=5), stored)
    assert container_of(scaled)["image"] == "mirror/image", "its Pods are as applied"
    assert (scaled["spec"]["replicas"], scaled["metadata"]["labels"]["l"]) == (5, "1")
    other = build(template={"spec": {"containers": [CONTAINER | {"image": "org/other"}]}})
    assert keep_admitted(other, stored) == other


def test_immutable_template_of_a_job_is_kept_whoever_owns_it():
    desired = build("Job", parallelism=1)
    stored = store(desired)
    container_of(stored)["env"].pop()
    stored["metadata"]["labels"]["l"] = "edited"
    stored["metadata"]["managedFields"] = []
    kept = keep_admitted(desired, stored)
    assert kept["spec"] == stored["spec"]
    assert kept["metadata"] == desired["metadata"]


def test_entry_of_own_applies_is_not_that_of_a_subresource_or_of_updates():
    entries = [
        {"manager": "rljob-operator", "operation": "Apply", "subresource": "status"},
        {"manager": "rljob-operator", "operation": "Update"},
        {"manager": "argocd", "operation": "Apply"},
    ]
    assert find_own_entry(entries) is None
    wanted = {"manager": "rljob-operator", "operation": "Apply"}
    assert find_own_entry([*entries, wanted]) == wanted
