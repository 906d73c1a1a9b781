"""The chart's policy for fields of Pod templates on a real API server: what it refuses, with which message.

It must agree with the operator's own check, which is by the same schema.
"""

import json

import pytest
from kubernetes import client

from rljob_api import API_VERSION
from rljob_api.read.documents import format_path
from rljob_core.pod_checks.schema import find_type_violations
from tests.integration.apiserver.field_policy import install_field_policy
from tests.integration.apiserver.test_template_policy import CHART, build_spec
from tests.support.waiting import wait_for

TABLE = json.loads((CHART / "files" / "pod_fields.json").read_text())
NAMESPACE = "field-policy"
VALUES = {"s": "1", "i": 1, "b": True, "q": "1Gi", "p": 80, "o": {}}
TEXT, NUMBER, LIST, MAP = "must be text", "must be a whole number", "must be a list", "must be a mapping"

REFUSED = [
    ({"nodeSelectr": {"a": "b"}}, "nodeSelectr is unknown in Kubernetes", "nodeSelector"),
    ({"containers": [{"name": "head", "resorces": {}}]}, "containers[0].resorces is unknown", "resources"),
    ({"initContainers": [{"name": "x", "env": [{"val": "b"}]}]}, "initContainers[0].env[0].val is", "value"),
    ({"volumes": [{"name": "x", "hostPaths": {}}]}, "volumes[0].hostPaths is unknown", "hostPath"),
    ({"dnsConfig": {"x": 1}}, "dnsConfig.x is unknown", "; known fields are nameservers, options, searches; correct"),
    ({"hos": 1}, "hos is unknown", "did you mean hostAliases or hostIPC or hostNetwork or hostPID or hostUsers or "),
    ({"nodeSelector": {"gpu": True}}, f"nodeSelector.gpu {TEXT}; put it in quotes", ""),
    ({"tolerations": {"key": "a"}}, f"tolerations {LIST}", ""),
    ({"containers": {"name": "head"}}, f"containers {LIST}", ""),
    ({"containers": [{"name": "head", "command": "sh"}]}, f"containers[0].command {LIST}", 'got "sh"'),
    ({"containers": [{"name": "head", "args": [1]}]}, f"containers[0].args[0] {TEXT}; put it in quotes", ""),
    ({"containers": [{"name": "head", "env": ["A=b"]}]}, f'containers[0].env[0] {MAP} (name: value), got "A=b"', ""),
    ({"containers": [{"name": "head", "tty": "true"}]}, 'containers[0].tty must be true or false, got "true"', ""),
    ({"terminationGracePeriodSeconds": "30"}, f'terminationGracePeriodSeconds {NUMBER}, got "30"', ""),
    ({"securityContext": 1}, f"securityContext {MAP}", ""),
    ({"containers": [{"name": "head", "resources": {"limits": {"cpu": True}}}]}, "limits.cpu must be a quantity", ""),
]
"""A PodSpec, and parts of the message about it."""
PASSED = [
    None,
    {"nodeSelectr": None, "containers": None, "securityContext": {"runAsUser": None}},
    {"containers": [{"name": "head", "resources": {"limits": {"cpu": 1, "memory": "1.5Gi", "nvidia.com/gpu": 2}}}]},
    {"containers": [{"name": "head", "livenessProbe": {"httpGet": {"port": "http"}, "periodSeconds": 3}}]},
]


def build_full(name, depth=0):
    """Return a value that has each field of a type."""
    if depth > TABLE["levels"]:
        return {}
    return {field: build_value(kind, depth) for field, kind in TABLE["types"][name].items()}


def build_value(kind, depth):
    if kind[0] == "[":
        return [build_value(kind[1:], depth)]
    if kind[0] == "{":
        return {"cpu": build_value(kind[1:], depth)}
    return build_full(kind, depth + 1) if kind in TABLE["types"] else VALUES[kind]


@pytest.fixture(scope="module")
def create(control_plane, api_client, crds):
    """Return a function that creates an RLJob or a RewardModel in a dry run and returns (code, message)."""
    install_field_policy(control_plane, NAMESPACE, "x")
    client.CoreV1Api(api_client).create_namespace({"metadata": {"name": NAMESPACE}})
    custom = client.CustomObjectsApi(api_client)

    def run(spec, kind="RLJob"):
        manifest = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "x"}, "spec": spec}
        place = (*API_VERSION.split("/"), NAMESPACE, f"{kind.lower()}s")
        try:
            custom.create_namespaced_custom_object(*place, manifest, dry_run="All")
        except client.ApiException as error:
            return error.status, json.loads(error.body)["message"]
        return 201, ""

    wait_for(lambda: run(build_spec(head({"x": 1})))[0] == 422, "the policy is in force")
    return run


def head(pod):
    return {"head": {"template": {"spec": pod}}}


@pytest.mark.parametrize(("pod", "message", "hint"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_kubernetes_does_not_have_is_refused_with_its_path(create, pod, message, hint):
    code, found = create(build_spec(head(pod)))
    assert (code, message in found, hint in found) == (422, True, True), found
    given = {"containers": []} | pod
    (location,) = [place for place, problem in find_type_violations({"spec": given}) if problem != "is required"]
    assert f"spec.head.template.{format_path(location)} " in found, "the operator names the same field"


@pytest.mark.parametrize("pod", PASSED, ids=lambda value: json.dumps(value)[:60])
def test_nulls_and_both_forms_of_a_value_pass(create, pod):
    assert create(build_spec(head(pod))) == (201, "")


def test_a_quantity_that_is_none_is_refused(create):
    code, message = create(
        build_spec(head({"containers": [{"name": "head", "resources": {"limits": {"cpu": "abc"}}}]}))
    )
    assert code == 422
    assert 'containers[0].resources.limits.cpu must be a quantity such as 500m, 2 or 16Gi, got "abc"' in message


def test_every_field_of_a_template_passes(create):
    full = build_full(TABLE["root"])
    volumes = full["spec"]["volumes"][0]
    # One template with all is above the number of mappings that is checked.
    full["spec"]["volumes"] = [{"name": "x", name: source} for name, source in volumes.items() if name != "name"]
    for field, value in full["spec"].items():
        assert create(build_spec(head({field: value}))) == (201, ""), field
    assert create(build_spec({"head": {"template": {"metadata": full["metadata"]}}})) == (201, "")


def test_every_role_is_checked_and_a_long_list_of_problems_is_cut(create):
    wrong = {"template": {"spec": {f"x{number}": 1 for number in range(6)}}}
    code, message = create(build_spec({"trainer": wrong, "rollout": wrong}))
    assert code == 422
    assert "; and 4 more; correct these fields" in message
    named = [f"spec.rollout.template.spec.x{number} is" for number in range(6)]
    named += [f"spec.trainer.template.spec.x{number} is" for number in range(2)]
    assert [message.index(name) for name in named] == sorted(message.index(name) for name in named)
    agent = {"type": "program", "runner": {"command": ["agent"]} | wrong}
    _, message = create(build_spec({"agent": agent, "rewards": []}))
    assert "spec.agent.runner.template.spec.x5 is unknown" in message
    _, message = create({"function": {"inline": "x"}} | wrong, kind="RewardModel")
    assert "spec.template.spec.x5 is unknown" in message


def test_a_job_too_large_to_check_is_left_to_the_operator(create):
    env = [{"name": f"A{number}", "valu": "x"} for number in range(1100)]
    assert create(build_spec(head({"containers": [{"name": "head", "env": env}]}))) == (201, "")
