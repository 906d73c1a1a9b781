"""All Pods of a role in one domain, by Kueue or by affinity.

Kueue's annotations: kubernetes-sigs/kueue apis/kueue/v1beta2/topology_types.go, read for Pods by
pkg/controller/jobframework/tas.go; the feature is on by default since 0.14.
"""

import pytest
import yaml

from rljob_api.manifest.services.reward import RewardModel
from rljob_core.children import WORKLOAD_KINDS, build_children
from rljob_core.children.service import build_server, service_of
from rljob_core.defaults import DEFAULTS
from rljob_core.plan.validate import find_problems
from tests.support.job_simulation import FUNCTION, make_job

RACK = {"nodePool": {"topology": {"key": "example.com/rack"}}}
NEAR = {"nodePool": {"topology": {"key": "example.com/rack", "required": False}}}
KUEUE = {"scheduling": {"gang": "kueue", "queue": "research"}}


def templates(**spec):
    job = make_job(**spec)
    assert find_problems(job) == []
    children = build_children(job, "token", DEFAULTS)
    return {c["metadata"]["name"]: c["spec"]["template"] for c in children if c["kind"] in WORKLOAD_KINDS}


def topology_annotations(template):
    return {k: v for k, v in template["metadata"]["annotations"].items() if "topology" in k}


def affinities(found):
    return {name: template["spec"]["affinity"] for name, template in found.items() if "affinity" in template["spec"]}


@pytest.mark.parametrize("gang", ["none", "gates"])
def test_pods_of_a_role_require_each_others_domain(gang):
    found = templates(trainer=RACK, scheduling={"gang": gang})
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": "trainer"}
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "example.com/rack"}
    required = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    assert affinities(found) == {"gsm8k-trainer": required}
    own = found["gsm8k-trainer"]["metadata"]["labels"]
    assert labels.items() <= own.items(), "a Pod satisfies its own term, or the first one could never start"
    assert not any(map(topology_annotations, found.values()))


def test_a_preference_is_an_affinity_with_a_weight():
    [affinity] = affinities(templates(rollout=NEAR)).values()
    [preferred] = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["weight"] == 100
    assert preferred["podAffinityTerm"]["topologyKey"] == "example.com/rack"
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in affinity["podAffinity"]


def test_kueue_chooses_the_domain_by_its_annotations_and_no_affinity_contradicts_it():
    found = templates(trainer=RACK, rollout=NEAR, **KUEUE)
    assert {name: topology_annotations(template) for name, template in found.items()} == {
        "gsm8k-head": {},
        "gsm8k-trainer": {"kueue.x-k8s.io/podset-required-topology": "example.com/rack"},
        "gsm8k-rollout": {"kueue.x-k8s.io/podset-preferred-topology": "example.com/rack"},
        "gsm8k-reward-correct": {},
    }
    assert affinities(found) == {}


def test_pods_that_kueue_queues_one_by_one_have_an_affinity():
    scaled = {"name": "correct", "function": FUNCTION, "autoscaling": {"maxReplicas": 4}, **RACK}
    found = templates(rewards=[scaled], **KUEUE)
    assert list(affinities(found)) == ["gsm8k-reward-correct"]
    assert topology_annotations(found["gsm8k-reward-correct"]) == {}


def test_exclusive_nodes_and_the_affinity_of_a_template_stay():
    [pool] = RACK.values()
    own = {"labelSelector": {"matchLabels": {"app": "cache"}}, "topologyKey": "zone"}
    template = {"spec": {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [own]}}}}
    found = templates(trainer={"nodePool": pool | {"exclusive": True}, "template": template})
    affinity = found["gsm8k-trainer"]["spec"]["affinity"]
    required = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [term["topologyKey"] for term in required] == ["example.com/rack", "zone"]
    assert affinity["podAntiAffinity"]


def test_pods_of_a_reward_model_are_in_one_domain():
    manifest = f"metadata: {{name: shared}}\nspec: {{function: {{inline: x}}, nodePool: {RACK['nodePool']}}}"
    model = RewardModel.model_validate(yaml.safe_load(manifest))
    [workload] = [c for c in build_server(service_of(model), "token", DEFAULTS) if c["kind"] == "Deployment"]
    template = workload["spec"]["template"]
    [term] = template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
