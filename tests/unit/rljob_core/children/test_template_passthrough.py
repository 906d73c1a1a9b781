"""What a cluster's rules require of Pods reaches every role through `template`, and removes nothing."""

import pytest

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_core.backend import ObservedState, utc_now
from rljob_core.children import WORKLOAD_KINDS, build_children
from rljob_core.defaults import DEFAULTS
from rljob_core.plan.reward_model import plan_reward_model

SPREAD = {
    "maxSkew": 1,
    "topologyKey": "topology.kubernetes.io/zone",
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"rljob.dev/job": "gsm8k"}},
}
POD = {
    "priorityClassName": "research",
    "topologySpreadConstraints": [SPREAD],
    "runtimeClassName": "gvisor",
    "imagePullSecrets": [{"name": "registry"}, {"name": "mirror"}],
    "serviceAccountName": "trainer",
    "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["license"]}],
    "dnsConfig": {"options": [{"name": "ndots", "value": "1"}]},
    "schedulerName": "packer",
}
VOLUME = {"name": "cache", "persistentVolumeClaim": {"claimName": "hub-cache"}}
MOUNT = {"name": "cache", "mountPath": "/cache"}
ROLES = ("head", "trainer", "rollout", "reward")


def make_template(container):
    """A user's template: fields of the role's container, and an extra container."""
    containers = [
        {"name": container, "volumeMounts": [MOUNT], "envFrom": [{"secretRef": {"name": "keys"}}]},
        {"name": "logs", "image": "shipper:1"},
    ]
    init = [{"name": "fetch", "image": "fetcher:1"}]
    metadata = {"labels": {"team": "nlp", "rljob.dev/role": "mine"}, "annotations": {"cost-center": "7"}}
    return {"metadata": metadata, "spec": POD | {"volumes": [VOLUME], "containers": containers, "initContainers": init}}


def make_templates(with_template=True, pools=None):
    parts = {role: {"template": make_template(role)} if with_template else {} for role in ROLES}
    for role in ROLES:
        parts[role] = parts[role] | ({"nodePool": pools} if pools else {})
    reward = parts.pop("reward") | {"name": "correct", "function": {"inline": "def reward(): ..."}}
    spec = {"model": {"source": "/m"}, "data": {"train": {"source": "/d.jsonl"}}, "rewards": [reward], **parts}
    job = RLJob.model_validate({"metadata": {"name": "gsm8k", "uid": "u1"}, "spec": spec})
    children = build_children(job, "token", DEFAULTS)
    return {
        child["spec"]["template"]["metadata"]["labels"]["rljob.dev/role"]: child["spec"]["template"]
        for child in children
        if child["kind"] in WORKLOAD_KINDS
    }


@pytest.mark.parametrize("role", ROLES)
def test_pod_fields_of_the_template_reach_the_pod(role):
    spec = make_templates()[role]["spec"]
    for field, value in POD.items():
        assert spec[field] == value, field
    assert VOLUME in spec["volumes"]
    assert [c["name"] for c in spec["initContainers"]] == ["fetch"]


@pytest.mark.parametrize("role", ROLES)
def test_role_container_keeps_its_fields_and_gets_the_templates(role):
    plain, made = make_templates(with_template=False)[role]["spec"], make_templates()[role]["spec"]
    ours, (main, sidecar) = plain["containers"][0], made["containers"]
    assert (main["name"], sidecar["name"]) == (role, "logs")
    assert main["volumeMounts"] == [*ours["volumeMounts"], MOUNT]
    assert main["envFrom"] == [{"secretRef": {"name": "keys"}}]
    changed = ("volumeMounts", "envFrom")
    assert {k: v for k, v in main.items() if k not in changed} == {k: v for k, v in ours.items() if k not in changed}
    assert made["volumes"] == [*plain["volumes"], VOLUME]
    assert made["automountServiceAccountToken"] is False, "a name of an account is not yet its token"


@pytest.mark.parametrize("role", ROLES)
def test_template_labels_and_annotations_are_added(role):
    metadata = make_templates()[role]["metadata"]
    assert metadata["labels"]["team"] == "nlp"
    assert metadata["labels"]["rljob.dev/role"] == role, "selectors rest on it"
    assert metadata["annotations"]["cost-center"] == "7"


def test_pool_and_template_constraints_are_combined():
    taint = {"key": "rljob.dev/pool", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"}
    pools = {"nodeSelector": {"rljob.dev/pool": "gpu"}, "tolerations": [taint], "exclusive": True}
    spec = make_templates(pools=pools)["rollout"]["spec"]
    assert spec["nodeSelector"] == {"rljob.dev/pool": "gpu"}
    assert spec["tolerations"] == [taint]
    assert spec["topologySpreadConstraints"] == [SPREAD]
    assert "podAntiAffinity" in spec["affinity"]


def test_reward_model_template_reaches_its_pods():
    spec = {"function": {"inline": "def reward(): ..."}, "template": make_template("reward")}
    model = RewardModel.model_validate({"metadata": {"name": "style", "uid": "u2"}, "spec": spec})
    children = plan_reward_model(model, ObservedState(), utc_now(), new_token=lambda: "t").children
    made = next(c for c in children if c["kind"] == "Deployment")["spec"]["template"]["spec"]
    for field, value in POD.items():
        assert made[field] == value, field
    assert VOLUME in made["volumes"]
