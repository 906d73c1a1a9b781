"""The children of a job, as manifests that `kubectl apply` takes. Pure: no cluster, no clock, no randomness."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_core.backend import ChildKey, Manifest
from rljob_core.children.common import POD_KINDS as POD_KINDS
from rljob_core.children.common import SANDBOX_POOL as SANDBOX_POOL
from rljob_core.children.common import SANDBOX_TEMPLATE, child_name
from rljob_core.children.common import WORKLOAD_KINDS as WORKLOAD_KINDS
from rljob_core.children.config import build_clients_secret, build_job_config, build_service_config, build_token_secret
from rljob_core.children.head import build_head
from rljob_core.children.network import build_disruption_budgets, build_network_policies
from rljob_core.children.reward_refs import resolve_http
from rljob_core.children.rollout import build_rollout
from rljob_core.children.sandbox import build_sandboxes
from rljob_core.children.service import build_server, find_services
from rljob_core.children.trainer import build_trainer
from rljob_core.defaults import Defaults

_ORDER = (
    *("Secret", "ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Service", "NetworkPolicy"),
    *("PodDisruptionBudget", SANDBOX_TEMPLATE, SANDBOX_POOL, *WORKLOAD_KINDS),
)
"""Workloads come last: their configuration and NetworkPolicy exist before a Pod starts."""


def build_children(
    job: RLJob, token: str, defaults: Defaults, models: Mapping[str, RewardModel] = MappingProxyType({})
) -> list[Manifest]:
    """All children, in the order to apply them. `models` are the RewardModels that the job references, as far as they
    exist. Raises UserError for a spec that cannot be built."""
    job = resolve_http(job, models)
    services = find_services(job)
    children = [build_token_secret(job, child_name(job, "token"), token), build_job_config(job)]
    if job.spec.service:
        children.append(build_clients_secret(job, job.spec.service.derive_keys(token)))
    children += [build_service_config(service) for service in services]
    children += build_head(job, token, defaults, models)
    children += build_trainer(job, token, defaults) if job.spec.trains else []
    children += [] if job.spec.shares_trainer else build_rollout(job, token, defaults)
    for service in services:
        children += build_server(service, token, defaults) + build_sandboxes(job, service, token, defaults)
    children += build_network_policies(job, models, defaults.operator_namespace)
    children += build_disruption_budgets(job, children)
    return sort_children(children)


def sort_children(children: list[Manifest]) -> list[Manifest]:
    return sorted(children, key=lambda child: _ORDER.index(child["kind"]))


def sort_deletions(keys: Iterable[ChildKey]) -> list[ChildKey]:
    """What runs Pods is deleted before what protects them."""
    return sorted(keys, key=lambda key: (key.kind not in POD_KINDS, key))
