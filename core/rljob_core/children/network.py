"""NetworkPolicies, closed by default, and PodDisruptionBudgets.

Open within a job: head <-> trainers and trainers among themselves (all ports: Ray and NCCL choose their own), head ->
rollouts, head -> rewards, simulated user, tools and runner, rollouts -> head and trainers (weights), rollouts among
themselves (weights), runner -> head (the gateway to the policy), all Pods of the namespace -> head (the API of a
training service, which asks for a key). With rollout.placement trainer,
the rollouts' Pods are the trainers, which also get requests of servers whose models run there. Open beyond it: DNS,
what the spec names (hf://, an http reward, URLs in a role's env), the operator's poll of the driver, and scrapes from
labelled namespaces. Functions are user code: they reach nothing, unless function.network is set, or requirements need
the package index.
Invariant: except for DNS, no Pod reaches an address at which a cloud serves the node's credentials or settings.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal
from urllib.parse import urlsplit

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Role
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.manifest.sources import OBJECT_SCHEMES
from rljob_api.wire.contract import (
    LABEL_JOB,
    LABEL_ROLE,
    PORT_CLIENTS,
    PORT_DRIVER,
    PORT_GATEWAY,
    PORT_ROLLOUT,
    PORT_SANDBOX,
    PORT_SERVICE,
    PORT_WEIGHTS,
)
from rljob_core.backend import Manifest, Owner
from rljob_core.children.common import AGENT, HEAD, REWARD, ROLLOUT, TRAINER, build_child, build_selector, child_name
from rljob_core.children.env import list_tracing_urls
from rljob_core.children.reward_refs import served_models
from rljob_core.children.sandbox import find_sandbox_labels
from rljob_core.children.service import HostedService, build_model_selector, find_services, hub_of, storage_of
from rljob_core.children.trainer import name_engine_ports

LABEL_MONITORING = "rljob.dev/monitoring"
"""A namespace with this label set to `true` may scrape /metrics. All other paths need the token."""
OPERATOR_LABELS = {"app.kubernetes.io/name": "rljob-operator"}
_MONITORING: Manifest = {"namespaceSelector": {"matchLabels": {LABEL_MONITORING: "true"}}}
_NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""A label that the API server sets on every namespace; no one can change it."""
_METADATA_ADDRESSES = {
    "0.0.0.0/0": (
        "169.254.0.0/16",  # link-local: most clouds, and the credentials of AWS's tasks and Pods
        "100.100.100.200/32",  # Alibaba Cloud
        "168.63.129.16/32",  # Azure's WireServer
        "192.0.0.192/32",  # Oracle Cloud's classic metadata
    ),
    "::/0": (
        "fe80::/10",  # link-local
        "fd00:ec2::/32",  # AWS: metadata, credentials of Pods, DNS and time
        "fd20:ce::254/128",  # Google Cloud
        "fd00:c1::a9fe:a9fe/128",  # Oracle Cloud
        "fd00:42::42/128",  # Scaleway
    ),
}
"""Where clouds serve credentials and settings of the node, by the block of addresses that contains them."""
_ANYWHERE: list[Manifest] = [
    *({"ipBlock": {"cidr": cidr, "except": list(closed)}} for cidr, closed in _METADATA_ADDRESSES.items()),
    {"namespaceSelector": {}},  # some network plugins apply address blocks only to what is outside the cluster
]
_DEFAULT_PORTS = {"http": 80, "https": 443, "hf": 443, **dict.fromkeys(OBJECT_SCHEMES, 443)}
_PACKAGE_INDEX, _WANDB = "https://pypi.org", "https://api.wandb.ai"
_API_SERVER = [{"protocol": "TCP", "port": port} for port in (443, 6443, 8443)]
"""Ports of API servers. A NetworkPolicy cannot name one: it is not a Pod, and its address differs by cluster."""
_DNS_PORTS = (53, 5353)
"""OpenShift's DNS Pods listen on 5353. A policy sees the port of the Pod, not of its Service."""
_DNS: Manifest = {"ports": [{"protocol": protocol, "port": port} for port in _DNS_PORTS for protocol in ("UDP", "TCP")]}
"""To any address: cluster DNS may be Pods, or an address of the node (NodeLocal DNSCache)."""


def build_network_policies(
    job: RLJob, models: Mapping[str, RewardModel], operator_namespace: str | None = None
) -> list[Manifest]:
    """One policy for head and trainers, whose Ray runs on each what any of them asks for, and one for the rollouts and
    per service. The first also opens egress to the RewardModels in `models`, and ingress from the operator; if its
    namespace is unknown, from any."""
    services = find_services(job)
    head, trainer, rollout = (_peer(build_selector(job, role)) for role in (HEAD, TRAINER, ROLLOUT))
    rollouts = [] if job.spec.shares_trainer else [rollout]
    servers = [_peer(build_selector(job, REWARD))]
    servers += [_peer(build_selector(job, AGENT))] if any(s.role == AGENT for s in services) else []
    servers += [_peer(build_model_selector(name)) for name in served_models(job, models)]
    runners = [_peer(service.selector) for service in services if service.calls_policy]
    group = [head, trainer]
    namespace = {"matchLabels": {_NAMESPACE_NAME: operator_namespace}} if operator_namespace else {}
    operator = {"namespaceSelector": namespace} | _peer(OPERATOR_LABELS)

    def build(role: str, ingress: list[Manifest], egress: list[Manifest], urls: Iterable[str] = ()) -> Manifest:
        sources = (*_hub_urls(job), job.spec.model.source, *_env_urls(getattr(job.spec, role)), *urls)
        egress = [*egress, _DNS, *_egress_to(sources)]
        return _build_policy(job, child_name(job, role), build_selector(job, role), ingress, egress)

    ingress = [
        {"from": group},
        *_open("from", rollouts, PORT_DRIVER, PORT_WEIGHTS),
        *_open("from", [operator, _MONITORING], PORT_DRIVER),
        *_open("from", [_MONITORING], *name_engine_ports(job).values()),
        *_open("from", runners, PORT_GATEWAY),
        *_open("from", [{"podSelector": {}}] if job.spec.service else [], PORT_CLIENTS),
        *(rule for each in services for rule in _open("from", [_peer(each.selector)], *each.engine_ports)),
    ]
    egress = [{"to": group}, *_open("to", rollouts, PORT_ROLLOUT), *_open("to", servers, PORT_SERVICE)]
    policies = [build(HEAD, ingress, egress, _head_urls(job))]
    policies[0]["spec"]["podSelector"] = {
        "matchLabels": {LABEL_JOB: job.metadata.name},
        "matchExpressions": [{"key": LABEL_ROLE, "operator": "In", "values": [HEAD, TRAINER]}],
    }
    if rollouts:
        ingress = [*_open("from", [head], PORT_ROLLOUT), *_open("from", [_MONITORING], PORT_ROLLOUT)]
        ingress += _open("from", rollouts, PORT_WEIGHTS)
        egress = [*_open("to", [head], PORT_DRIVER), *_open("to", [trainer, *rollouts], PORT_WEIGHTS)]
        policies.append(build(ROLLOUT, ingress, egress))
    return policies + [build_service_policy(service, head) for service in services]


def build_service_policy(service: HostedService, head: Manifest) -> Manifest:
    """The policy of the Pods of a service. `head` selects the Pods that may send requests."""
    ingress = [*_open("from", [head], PORT_SERVICE), *_open("from", [_MONITORING], PORT_SERVICE)]
    egress = _build_service_egress(service)
    egress += _open("to", [head], PORT_GATEWAY) if service.calls_policy else []
    return _build_policy(service.owner, service.name, service.selector, ingress, egress)


def _build_service_egress(service: HostedService) -> list[Manifest]:
    """For a function: all but the node's metadata, the package index of its requirements, or nothing. For a tool with
    sandboxes: these, and the API server to claim them. For others: the URLs in their env, the chat endpoint, and the
    hub or the storage that a model comes from. A runner's workers may open sockets in any case, so it gets the URLs in
    its env, too. All: the collector of traces."""
    settings, hub, storage = service.settings, hub_of(service.owner), storage_of(service.owner)
    function = settings.function
    if service.sandbox:
        sandboxes = _open("to", [_peer(find_sandbox_labels(service))], PORT_SANDBOX)
        traces = _egress_to(list_tracing_urls(service.owner, settings))
        return [_DNS, *sandboxes, {"to": _ANYWHERE, "ports": _API_SERVER}, *traces]
    if function and function.network:
        return [_DNS, {"to": _ANYWHERE}]
    reads_env = not function or function.requirements or service.calls_policy
    urls = _env_urls(settings) if reads_env else []
    if function and function.requirements:
        urls.append(_PACKAGE_INDEX)
    if settings.served_model and service.has_sidecar:
        urls += [settings.served_model.source, hub.endpoint or "", storage.endpoint or ""]
    if settings.endpoint:
        urls.append(settings.endpoint.url)
    urls += list_tracing_urls(service.owner, settings)
    trainers = [_peer(build_selector(service.owner, TRAINER))] if isinstance(service.owner, RLJob) else []
    egress = _open("to", trainers, *service.engine_ports) + _egress_to(urls)
    return [_DNS, *egress] if egress else []


def _build_policy(
    owner: Owner, name: str, selector: dict[str, str], ingress: list[Manifest], egress: list[Manifest]
) -> Manifest:
    spec = {
        "podSelector": {"matchLabels": selector},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    return build_child("networking.k8s.io/v1", "NetworkPolicy", owner, name, selector, spec=spec)


def _peer(labels: dict[str, str]) -> Manifest:
    return {"podSelector": {"matchLabels": labels}}


def _open(direction: Literal["from", "to"], peers: list[Manifest], *ports: int) -> list[Manifest]:
    """The rule for these peers and ports. No rule without peers or without ports: Kubernetes reads an empty list as
    everything."""
    rule = {direction: peers, "ports": [{"protocol": "TCP", "port": port} for port in ports]}
    return [rule] if peers and ports else []


def _head_urls(job: RLJob) -> Iterator[str]:
    spec = job.spec
    yield from (each.source.source for each in spec.data.train_sources)
    yield from (each.data.source for each in spec.held_out_sets)
    if spec.checkpoint.storage:
        yield spec.checkpoint.storage
    if spec.tracking.wandb_project or spec.tracking.trackio_project:  # a Space has the same port
        yield _WANDB
    yield from list_tracing_urls(job, spec.head)
    yield from (model.source for model in spec.models_in_trainer.values())
    yield from _env_urls(spec.trainer)
    yield from (reward.http.url for reward in spec.rewards if reward.http)
    yield from (model.url for model in spec.agent.models)


def _hub_urls(job: RLJob) -> list[str]:
    """Where hf:// and s3:// sources come from, if the job says so."""
    return [url for url in (job.spec.hub.endpoint, job.spec.object_storage.endpoint) if url]


def _env_urls(role: Role) -> list[str]:
    """The URLs in a role's env (HF_ENDPOINT, HTTPS_PROXY, MLFLOW_TRACKING_URI, a judge's base URL)."""
    return [value for value in role.env.values() if value.startswith(("http://", "https://"))]


def _egress_to(urls: Iterable[str]) -> list[Manifest]:
    """Egress on the ports of URLs and sources to any address but the node's metadata: a NetworkPolicy cannot name
    hosts."""
    ports = sorted({port for port in map(_port_of, urls) if port})
    return [{"to": _ANYWHERE, "ports": [{"protocol": "TCP", "port": port} for port in ports]}] if ports else []


def _port_of(url: str) -> int | None:
    """None for paths, claims, and templates such as http://$(HOST):$(PORT), which the kubelet expands."""
    try:
        parts = urlsplit(url)
        return parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return None


def build_disruption_budgets(owner: Owner, children: list[Manifest]) -> list[Manifest]:
    """Deployments among `children` of several Pods allow the eviction of one at a time. The head is protected only if
    an eviction would lose the run, that is without spec.checkpoint's claim or storage. Otherwise, and for trainers, it
    costs some steps, which is better than to block drains for days. A Job has no scale subresource, so its budget must
    use minAvailable."""
    several = [child for child in children if child["kind"] == "Deployment" and child["spec"]["replicas"] > 1]
    found = [(c["metadata"]["name"], c["spec"]["selector"]["matchLabels"], {"maxUnavailable": 1}) for c in several]
    if isinstance(owner, RLJob) and not owner.spec.checkpoint.outlives_head:
        found.insert(0, (child_name(owner, HEAD), build_selector(owner, HEAD), {"minAvailable": 1}))
    budgets = []
    for name, labels, amount in found:
        # A Pod that never becomes ready must not block a drain.
        spec = amount | {"selector": {"matchLabels": labels}, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
        budgets.append(build_child("policy/v1", "PodDisruptionBudget", owner, name, labels, spec=spec))
    return budgets
