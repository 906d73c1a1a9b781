"""NetworkPolicies, closed by default, and PodDisruptionBudgets.

Open within a job: head <-> trainers and trainers among themselves (all ports: Ray and NCCL choose their own), head ->
rollouts, head -> rewards, rollouts -> head and trainers (weights). Open beyond it: DNS, what the spec names (hf://, an
http reward, URLs in a role's env), the operator's poll of the driver, and scrapes from labelled namespaces. Reward
functions are user code: they reach nothing, unless function.network is set, or requirements need the package index.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward, RewardModel
from rljob_api.manifest.roles import Role
from rljob_api.manifest.sources import parse_source
from rljob_api.wire.contract import PORT_DRIVER, PORT_REWARD, PORT_ROLLOUT, PORT_WEIGHTS
from rljob_operator.backend import Manifest, Owner
from rljob_operator.children.common import HEAD, REWARD, ROLLOUT, TRAINER, build_metadata, build_selector, child_name
from rljob_operator.children.reward import RewardService, build_model_selector, find_services
from rljob_operator.children.reward_refs import served_models

LABEL_MONITORING = "rljob.dev/monitoring"
"""A namespace with this label set to `true` may scrape /metrics. All other paths need the token."""
OPERATOR_LABELS = {"app.kubernetes.io/name": "rljob-operator"}
_HTTPS_PORT = 443
_ONE_AT_A_TIME, _NONE = {"maxUnavailable": 1}, {"maxUnavailable": 0}
_DNS: Manifest = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}
"""To any address: cluster DNS may be Pods, or an address of the node (NodeLocal DNSCache)."""


def build_network_policies(job: RLJob, models: Mapping[str, RewardModel]) -> list[Manifest]:
    """One policy per role and per served reward. The head's also opens egress to the RewardModels in `models`."""
    head, trainer, rollout = (_peer(build_selector(job, role)) for role in (HEAD, TRAINER, ROLLOUT))
    rewards = [_peer(build_selector(job, REWARD))]
    rewards += [_peer(build_model_selector(name)) for name in served_models(job, models)]
    group = [head, trainer]

    def build(role: str, ingress: list[Manifest], egress: list[Manifest], ports: set[int]) -> Manifest:
        egress = [*egress, _DNS, *_egress_anywhere(ports)]
        return _build_policy(job, child_name(job, role), build_selector(job, role), ingress, egress)

    return [
        build(
            HEAD,
            [{"from": group}, _from([rollout], PORT_DRIVER), _from(_driver_clients(), PORT_DRIVER)],
            [{"to": group}, _to([rollout], PORT_ROLLOUT), _to(rewards, PORT_REWARD)],
            _head_ports(job),
        ),
        build(
            TRAINER,
            [{"from": group}, _from([rollout], PORT_WEIGHTS)],
            [{"to": group}],
            _model_ports(job, job.spec.trainer),
        ),
        build(
            ROLLOUT,
            [_from([head], PORT_ROLLOUT), _from(_monitoring_peers(), PORT_ROLLOUT)],
            [_to([head], PORT_DRIVER), _to([trainer], PORT_WEIGHTS)],
            _model_ports(job, job.spec.rollout),
        ),
        *(build_reward_policy(service, head) for service in find_services(job)),
    ]


def build_reward_policy(service: RewardService, head: Manifest) -> Manifest:
    """The policy of a reward's Pods. `head` selects the Pods that may request scores."""
    ingress = [_from([head], PORT_REWARD), _from(_monitoring_peers(), PORT_REWARD)]
    egress = _build_reward_egress(service.reward)
    return _build_policy(service.owner, service.name, service.selector, ingress, egress)


def _build_reward_egress(reward: Reward) -> list[Manifest]:
    """For a function: everything, the package index of its requirements, or nothing. For others: URLs in their env."""
    function = reward.function
    if function and function.network:
        return [{}]
    ports = _env_ports(reward) if function is None or function.requirements else set()
    if function and function.requirements:
        ports.add(_HTTPS_PORT)
    ports |= _scorer_ports(reward)
    return [_DNS, *_egress_anywhere(ports)] if ports else []


def _scorer_ports(reward: Reward) -> set[int]:
    """Ports of a judge's endpoint, and of the hub that a model comes from."""
    ports = _source_ports(reward.served_model.source) if reward.served_model else set()
    endpoint = reward.judge.endpoint if reward.judge else None
    return ports | (_url_ports(endpoint.url) if endpoint else set())


def _build_policy(
    owner: Owner, name: str, selector: dict[str, str], ingress: list[Manifest], egress: list[Manifest]
) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": build_metadata(owner, name, selector),
        "spec": {
            "podSelector": {"matchLabels": selector},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def _peer(labels: dict[str, str]) -> Manifest:
    return {"podSelector": {"matchLabels": labels}}


def _from(peers: list[Manifest], port: int) -> Manifest:
    return {"from": peers, "ports": [{"protocol": "TCP", "port": port}]}


def _to(peers: list[Manifest], port: int) -> Manifest:
    return {"to": peers, "ports": [{"protocol": "TCP", "port": port}]}


def _monitoring_peers() -> list[Manifest]:
    return [{"namespaceSelector": {"matchLabels": {LABEL_MONITORING: "true"}}}]


def _driver_clients() -> list[Manifest]:
    """Clients of the driver: the operator, in any namespace, and monitoring."""
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR_LABELS}}
    return [operator, *_monitoring_peers()]


def _egress_anywhere(ports: set[int]) -> list[Manifest]:
    """Egress to any address on some ports: a NetworkPolicy cannot name hosts."""
    return [{"ports": [{"protocol": "TCP", "port": port} for port in sorted(ports)]}] if ports else []


def _head_ports(job: RLJob) -> set[int]:
    data = job.spec.data
    ports = _model_ports(job, job.spec.head)
    for source in filter(None, (data.train, data.eval)):
        ports |= _source_ports(source.source)
    if job.spec.tracking.wandb_project:
        ports.add(_HTTPS_PORT)
    return ports.union(*(_url_ports(reward.http.url) for reward in job.spec.rewards if reward.http))


def _model_ports(job: RLJob, role: Role) -> set[int]:
    return _source_ports(job.spec.model.source) | _env_ports(role)


def _source_ports(source: str) -> set[int]:
    return {_HTTPS_PORT} if parse_source(source).kind == "hf" else set()


def _env_ports(role: Role) -> set[int]:
    """Ports of the URLs in a role's env (HF_ENDPOINT, HTTPS_PROXY, MLFLOW_TRACKING_URI, a judge's base URL)."""
    return set().union(*(_url_ports(v) for v in role.env.values() if v.startswith(("http://", "https://"))))


def _url_ports(url: str) -> set[int]:
    """The port of a URL; empty for templates such as http://$(HOST):$(PORT), which the kubelet expands."""
    try:
        parts = urlsplit(url)
        return {parts.port or (80 if parts.scheme == "http" else _HTTPS_PORT)}
    except ValueError:
        return set()


def build_disruption_budgets(job: RLJob) -> list[Manifest]:
    """Serving roles allow the eviction of one Pod at a time. The training group is protected only if an eviction would
    lose the run, that is without a checkpoint claim. With a claim it costs some steps, which is better than to block
    node drains for days. A Job has no scale subresource, so its budget must use minAvailable."""
    amounts = {} if job.spec.checkpoint.persistent_volume_claim else {HEAD: {"minAvailable": 1}, TRAINER: _NONE}
    amounts[ROLLOUT] = _ONE_AT_A_TIME
    budgets = [_build_budget(job, child_name(job, r), build_selector(job, r), a) for r, a in amounts.items()]
    return budgets + [build_reward_budget(service) for service in find_services(job)]


def build_reward_budget(service: RewardService) -> Manifest:
    return _build_budget(service.owner, service.name, service.selector, _ONE_AT_A_TIME)


def _build_budget(owner: Owner, name: str, selector: dict[str, str], amount: dict[str, int]) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": build_metadata(owner, name, selector),
        "spec": amount
        | {
            "selector": {"matchLabels": selector},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",  # a Pod that never becomes ready must not block a drain
        },
    }
