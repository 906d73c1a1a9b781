"""What the Pods of a traced job get: the standard variables, and a way to the collector. Else nothing."""

import pytest

from rljob_api.manifest.services.reward import RewardModel
from rljob_core.children import WORKLOAD_KINDS, build_children
from rljob_core.children.common import ANNOTATION_CONFIG_HASH
from rljob_core.children.network import build_network_policies, build_service_policy
from rljob_core.children.service import build_server, service_of
from rljob_core.defaults import DEFAULTS
from tests.support.job_simulation import make_job

ENDPOINT = "http://collector.observability:4318"
SECRET = {"name": "otlp", "key": "headers"}


def build(**tracing):
    """Return the workloads by name. Without settings, nothing is traced."""
    settings = {"tracing": {"endpoint": ENDPOINT, **tracing}} if tracing else {}
    children = build_children(make_job(**settings), "token", DEFAULTS)
    return {each["metadata"]["name"]: each for each in children if each["kind"] in WORKLOAD_KINDS}


def read_env(workload):
    return {each["name"]: each for each in workload["spec"]["template"]["spec"]["containers"][0]["env"]}


def read_hash(workload):
    return workload["spec"]["template"]["metadata"]["annotations"][ANNOTATION_CONFIG_HASH]


def test_head_and_rewards_get_the_standard_variables():
    workloads = build(headersSecretRef=SECRET)
    for name in ("gsm8k-head", "gsm8k-reward-correct"):
        env = read_env(workloads[name])
        assert env["OTEL_EXPORTER_OTLP_ENDPOINT"]["value"] == ENDPOINT
        assert env["OTEL_EXPORTER_OTLP_HEADERS"]["valueFrom"] == {"secretKeyRef": SECRET}
    for name in ("gsm8k-trainer", "gsm8k-rollout"):
        assert not any(variable.startswith("OTEL_") for variable in read_env(workloads[name]))


def test_without_tracing_there_is_nothing():
    for workload in build().values():
        assert not any(name.startswith("OTEL_") for name in read_env(workload))


def test_variables_of_a_role_take_precedence():
    own = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://own:4318", "OTEL_SERVICE_NAME": "mine"}
    children = build_children(make_job(tracing={"endpoint": ENDPOINT}, head={"env": own}), "token", DEFAULTS)
    [head] = [each for each in children if each["kind"] == "Job"]
    assert {name: read_env(head)[name]["value"] for name in own} == own
    assert len(read_env(head)) == len(head["spec"]["template"]["spec"]["containers"][0]["env"]), "each once"


def test_a_change_restarts_what_is_traced_and_nothing_else():
    before, after, ratio = build(), build(samplingRatio=0.1), build(samplingRatio=0.5)

    def changed(one, other):
        return {name for name in one if read_hash(one[name]) != read_hash(other[name])}

    assert changed(before, after) == {"gsm8k-head", "gsm8k-reward-correct"}
    assert changed(after, ratio) == {"gsm8k-head"}, "servers follow the head's decision"


@pytest.mark.parametrize("name", ["gsm8k-head", "gsm8k-reward-correct"])
def test_the_network_policies_open_the_way_to_the_collector(name):
    policies = build_network_policies(make_job(tracing={"endpoint": ENDPOINT}), {})
    [policy] = [each for each in policies if each["metadata"]["name"] == name]
    ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", [])}
    assert 4318 in ports


def test_a_shared_reward_model_has_the_variables_of_its_env():
    spec = {"function": {"inline": "x"}, "env": {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}}
    model = RewardModel.model_validate({"metadata": {"name": "shared", "namespace": "n"}, "spec": spec})
    [deployment] = [each for each in build_server(service_of(model), "token", DEFAULTS) if each["kind"] == "Deployment"]
    assert read_env(deployment)["OTEL_EXPORTER_OTLP_ENDPOINT"]["value"] == ENDPOINT
    egress = build_service_policy(service_of(model), {})["spec"]["egress"]
    assert 4318 in {port["port"] for rule in egress for port in rule["ports"]}, "also for a function without network"
