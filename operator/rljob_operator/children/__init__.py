"""Every child of a job, as manifests that `kubectl apply` takes. Pure: no cluster, no clock, no randomness."""

from __future__ import annotations

from rljob_api.job import RLJob
from rljob_operator.backend import Manifest
from rljob_operator.children.config import build_job_config, build_reward_config, build_token_secret
from rljob_operator.children.gang import build_pod_group
from rljob_operator.children.head import build_head
from rljob_operator.children.network import build_disruption_budgets, build_network_policies
from rljob_operator.children.reward import build_reward
from rljob_operator.children.rollout import build_rollout
from rljob_operator.children.trainer import build_trainer
from rljob_operator.defaults import Defaults

WORKLOAD_KINDS = ("Job", "StatefulSet", "Deployment")
"""Children that have Pods. All else costs nothing, and stays while a job is suspended and after its end."""

_ORDER = ("Secret", "ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", "PodGroup", *WORKLOAD_KINDS)
"""Pods come last: their configuration is there when they start, and no Pod runs before its policy."""


def build_children(job: RLJob, token: str, defaults: Defaults) -> list[Manifest]:
    """All children, in the order to apply them. Raises UserError for a spec that cannot be built."""
    served = [reward for reward in job.spec.rewards if reward.function]
    children = [build_token_secret(job, token), build_job_config(job)]
    children += [build_reward_config(job, reward) for reward in served]
    children += build_head(job, token, defaults)
    children += build_trainer(job, token, defaults) + build_rollout(job, token, defaults)
    for index in range(len(job.spec.rewards)):
        children += build_reward(job, index, token, defaults)
    children += build_network_policies(job) + build_disruption_budgets(job) + build_pod_group(job)
    return sorted(children, key=lambda child: _ORDER.index(child["kind"]))
