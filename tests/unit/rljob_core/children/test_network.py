"""Who may reach the Pods of a job, and what they may reach."""

import ipaddress

import pytest

from rljob_api.manifest.services.reward import RewardModel
from rljob_core.backend import ObservedState, utc_now
from rljob_core.children import build_children
from rljob_core.children.network import OPERATOR_LABELS
from rljob_core.defaults import DEFAULTS
from rljob_core.plan.reward_model import plan_reward_model
from tests.support.job_simulation import make_agent_job, make_job, make_program_job, make_service_job

METADATA = (
    *("169.254.169.254", "169.254.170.2", "169.254.170.23", "169.254.0.23"),  # most clouds; AWS's Pods; Tencent
    *("100.100.100.200", "168.63.129.16", "192.0.0.192"),  # Alibaba, Azure, Oracle
    *("fe80::a9fe:a9fe", "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42"),
)
"""Where clouds serve credentials and settings of a node."""
ENDPOINT = {"url": "http://judge.example/v1", "model": "m"}
REWARDS = [
    {"name": "open", "function": {"inline": "x", "network": True}},
    {"name": "packages", "function": {"inline": "x", "requirements": ["math-verify"]}},
    {"name": "closed", "function": {"inline": "x"}},
    {"name": "judge", "judge": {"template": "x", "parser": {"regex": "(.)"}, "endpoint": ENDPOINT}},
]
ROLES = ("head", "trainer", "rollout", "reward-open", "reward-packages", "reward-closed", "reward-judge")


def find_policies(children):
    """By role; that of the head is also that of trainers."""
    found = {c["metadata"]["name"].removeprefix("gsm8k-"): c["spec"] for c in children if c["kind"] == "NetworkPolicy"}
    for expression in found.get("head", {}).get("podSelector", {}).get("matchExpressions", []):
        assert (expression["key"], expression["operator"]) == ("rljob.dev/role", "In")
        found |= dict.fromkeys(expression["values"], found["head"])
    return found


def build_policies(defaults=DEFAULTS, **spec):
    hub = {"endpoint": "http://hub.example"}  # port 80, as the metadata address
    return find_policies(build_children(make_job(**({"rewards": REWARDS, "hub": hub} | spec)), "token", defaults))


def may_reach(policy, address, port):
    """Return whether egress to an address outside the cluster is allowed."""
    return any(
        ("ports" not in rule or {"protocol": "TCP", "port": port} in rule["ports"])
        and ("to" not in rule or any(is_in(address, peer["ipBlock"]) for peer in rule["to"] if "ipBlock" in peer))
        for rule in policy["egress"]
    )


def is_in(address, block):
    networks = map(ipaddress.ip_network, (block["cidr"], *block.get("except", [])))
    inside, *excepted = (ipaddress.ip_address(address) in network for network in networks)
    return inside and not any(excepted)


@pytest.mark.parametrize("role", ROLES)
def test_metadata_of_the_node_is_never_reached(role):
    policy = build_policies()[role]
    assert not any(may_reach(policy, address, 80) for address in METADATA)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "169.253.255.255", "100.100.100.201", "2606:2800:220:1::1", "fd00:1::1"]
)
def test_what_the_spec_names_is_reached(address):
    policies = build_policies()
    reached = {role for role in ROLES if may_reach(policies[role], address, 80)}
    assert reached == {"head", "trainer", "rollout", "reward-open", "reward-judge"}
    assert may_reach(policies["reward-packages"], address, 443)


def test_object_storage_is_reached_by_all_that_load_models():
    reached = {"head", "trainer", "rollout"}
    source = {"hub": {}, "model": {"source": "s3://bucket/model"}, "data": {"train": {"source": "/rows.jsonl"}}}
    for spec, port in ((source, 443), ({"hub": {}, "objectStorage": {"endpoint": "http://storage:9000"}}, 9000)):
        policies = build_policies(**spec)
        assert {r for r in ("head", "trainer", "rollout") if may_reach(policies[r], "93.184.216.34", port)} == reached


def test_storage_of_the_runs_files_is_reached_by_the_ray_cluster_alone():
    local = {"hub": {}, "model": {"source": "/model"}, "data": {"train": {"source": "/rows.jsonl"}}}
    policies = build_policies(**local, checkpoint={"storage": "s3://bucket/runs"})
    roles = ("head", "trainer", "rollout")
    assert {role for role in roles if may_reach(policies[role], "93.184.216.34", 443)} == {"head", "trainer"}


def test_head_and_trainers_have_one_policy_and_others_their_own():
    policies = build_policies()
    assert policies["head"] is policies["trainer"]
    assert policies["head"]["podSelector"]["matchLabels"] == {"rljob.dev/job": "gsm8k"}
    ports = [{"protocol": "TCP", "port": 6379}]  # Ray's, which no rule names: all ports are open within the group
    group = [rule["from"] for rule in policies["head"]["ingress"] if rule.get("ports", ports) == ports]
    roles = [[peer["podSelector"]["matchLabels"]["rljob.dev/role"] for peer in peers] for peers in group]
    assert roles == [["head", "trainer"]], "no other Pod reaches Ray"


def test_services_of_the_cluster_are_reached_where_addresses_are_external_ones_only():
    policies = build_policies()
    for role in ("rollout", "reward-open", "reward-judge"):
        assert any({"namespaceSelector": {}} in rule.get("to", []) for rule in policies[role]["egress"]), role


@pytest.mark.parametrize("role", sorted(set(ROLES) - {"reward-closed"}))
def test_dns_is_reached_on_the_ports_of_kubernetes_and_openshift(role):
    ports = [(p["protocol"], p["port"]) for rule in build_policies()[role]["egress"] for p in rule.get("ports", [])]
    assert {("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353)} <= set(ports)


def test_function_without_network_reaches_nothing():
    assert build_policies()["reward-closed"]["egress"] == []


@pytest.mark.parametrize(
    ("namespace", "selector"), [("ops", {"matchLabels": {"kubernetes.io/metadata.name": "ops"}}), (None, {})]
)
def test_head_admits_the_operator_from_one_namespace(namespace, selector):
    policy = build_policies(DEFAULTS.model_copy(update={"operator_namespace": namespace}))["head"]
    peers = [peer for rule in policy["ingress"] for peer in rule["from"]]
    operators = [p for p in peers if p.get("podSelector", {}).get("matchLabels") == OPERATOR_LABELS]
    assert operators == [{"namespaceSelector": selector, "podSelector": {"matchLabels": OPERATOR_LABELS}}]


def test_ray_cluster_alone_reaches_an_agents_pods_which_reach_what_functions_may():
    tool = {"function": {"inline": "x", "network": True}}
    policies = find_policies(build_children(make_agent_job(tool=tool), "token", DEFAULTS))
    agents = {"rljob.dev/job": "gsm8k", "rljob.dev/role": "agent"}

    def select_peers(policy):
        return [peer.get("podSelector", {}).get("matchLabels") for r in policy["egress"] for peer in r.get("to", [])]

    assert {name for name, policy in policies.items() if agents in select_peers(policy)} == {"head", "trainer"}
    assert policies["agent-user"]["podSelector"]["matchLabels"] == agents | {"rljob.dev/agent": "user"}
    assert policies["agent-user"]["egress"] == []
    assert may_reach(policies["agent-calculator"], "93.184.216.34", 8000)
    assert not any(may_reach(policies["agent-calculator"], address, 80) for address in METADATA)


def test_rollouts_reach_the_weights_of_trainers_and_of_each_other():
    policies = build_policies()
    weights = [{"protocol": "TCP", "port": 8200}]
    rollout, trainer = (
        {"podSelector": {"matchLabels": {"rljob.dev/job": "gsm8k", "rljob.dev/role": r}}}
        for r in ("rollout", "trainer")
    )
    assert [rule["to"] for rule in policies["rollout"]["egress"] if rule.get("ports") == weights] == [
        [trainer, rollout]
    ]
    for role in ("trainer", "rollout"):
        opened = [rule["from"] for rule in policies[role]["ingress"] if weights[0] in rule.get("ports", [])]
        assert opened == [[rollout]]


def test_runner_alone_reaches_the_gateway_of_the_head():
    policies = find_policies(build_children(make_program_job(), "token", DEFAULTS))
    runner = {"rljob.dev/job": "gsm8k", "rljob.dev/role": "agent", "rljob.dev/agent": "runner"}
    gateway = [{"protocol": "TCP", "port": 8300}]
    (opened,) = [rule for rule in policies["head"]["ingress"] if rule.get("ports") == gateway]
    assert opened["from"] == [{"podSelector": {"matchLabels": runner}}]
    (only,) = policies["agent-runner"]["egress"]
    assert only["ports"] == gateway
    assert only["to"] == [{"podSelector": {"matchLabels": {"rljob.dev/job": "gsm8k", "rljob.dev/role": "head"}}}]
    others = find_policies(build_children(make_agent_job(), "token", DEFAULTS))
    assert "8300" not in str(others), "without a runner there is no gateway"


@pytest.mark.parametrize(
    ("runner", "ports"),
    [
        ({"env": {"SEARCH_URL": "http://search.example:8000"}}, {8000}),
        ({"function": {"inline": "x", "requirements": ["openai"]}}, {443}),
        ({"function": {"inline": "x", "network": True}}, {80, 443, 8000}),
        ({"function": None, "command": ["agent"], "network": True}, {80, 443, 8000}),
        ({"function": None, "command": ["agent"]}, set()),
    ],
)
def test_runner_reaches_beyond_the_job_what_its_settings_name(runner, ports):
    policy = find_policies(build_children(make_program_job(runner), "token", DEFAULTS))["agent-runner"]
    assert {port for port in (80, 443, 8000) if may_reach(policy, "93.184.216.34", port)} == ports
    assert not any(may_reach(policy, address, 80) for address in METADATA)


def test_reward_model_does_not_reach_the_metadata_either():
    spec = {"function": {"inline": "def reward(): ...", "network": True}}
    model = RewardModel.model_validate({"metadata": {"name": "m", "uid": "u"}, "spec": spec})
    (policy,) = find_policies(plan_reward_model(model, ObservedState({}), utc_now()).children).values()
    assert may_reach(policy, "93.184.216.34", 8000)
    assert not any(may_reach(policy, address, 80) for address in METADATA)


def test_only_the_ray_cluster_reaches_the_models_that_a_program_calls_by_name():
    models = [{"name": "judge", "url": "http://judge.example:8443/v1"}]
    policies = find_policies(build_children(make_program_job(models=models), "token", DEFAULTS))
    assert [role for role in policies if may_reach(policies[role], "93.184.216.34", 8443)] == ["head", "trainer"]


def test_rollouts_in_the_trainers_pods_are_reached_as_trainers():
    shared = {"rollout": {"placement": "trainer", "gpusPerReplica": 1}, "trainer": {"gpusPerReplica": 2}}
    policies = build_policies(**shared)
    assert "rollout" not in policies
    named = [peer for p in policies.values() for rule in p["ingress"] + p["egress"] for peer in find_peers(rule)]
    assert {"rljob.dev/job": "gsm8k", "rljob.dev/role": "rollout"} not in named
    scraped = policies["trainer"]["ingress"][-1]
    assert [port["port"] for port in scraped["ports"]] == [8000, 8001]
    assert scraped["from"] == [{"namespaceSelector": {"matchLabels": {"rljob.dev/monitoring": "true"}}}]


def find_peers(rule):
    peers = rule.get("from", []) + rule.get("to", [])
    return [peer["podSelector"]["matchLabels"] for peer in peers if "podSelector" in peer]


@pytest.mark.parametrize("rollout", [{}, {"placement": "trainer"}])
def test_no_rule_is_open_to_all_peers_or_all_ports_by_an_empty_list(rollout):
    for policy in build_policies(rollout=rollout).values():
        for rule in policy["ingress"] + policy["egress"]:
            assert all(rule.values()), "Kubernetes reads an empty list as everything"


def test_all_pods_of_the_namespace_reach_the_clients_port_of_a_service_alone():
    rule = {"from": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": 8700}]}
    for job, is_open in ((make_service_job(), True), (make_job(), False)):
        assert (rule in find_policies(build_children(job, "token", DEFAULTS))["head"]["ingress"]) is is_open
