"""The head: a Job of one Pod with the Ray head, the driver and the agent loops, and the Service that names it.

A Job, because the head alone ends: its success is the job's. Exit code 78 (the user's mistake) is never retried,
an eviction never counts, anything else counts against head.backoffLimit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward, RewardModel
from rljob_api.manifest.sources import parse_source
from rljob_api.wire.contract import (
    ENV_EVAL_DATA,
    ENV_HEAD_JOB_UID,
    ENV_REWARD_SERVICES,
    ENV_ROLLOUT_SERVICE,
    ENV_TRAIN_DATA,
    PORT_DRIVER,
    PORT_RAY,
    ExitCode,
)
from rljob_operator.backend import Manifest
from rljob_operator.children import pods, reward_refs
from rljob_operator.children.common import (
    HEAD,
    ROLLOUT,
    build_headless_service,
    build_metadata,
    build_selector,
    child_name,
    digest,
    reward_name,
)
from rljob_operator.defaults import Defaults

_PORTS = {"ray": PORT_RAY, "driver": PORT_DRIVER}
_GRACE_SECONDS = 60
_LIFE = "metadata.labels['batch.kubernetes.io/controller-uid']"
"""The uid of the head's Job: another one whenever someone has looked at the job, and kept while Pods are replaced."""
_NOT_READ = ("scheduling", "suspend", "managedBy", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "head")
"""Fields of spec that the driver does not read."""
_READ_BY_REWARD = {"function", "model", "judge", "queueLength"}
"""Fields of a reward that its server alone reads."""


def build_head(job: RLJob, token: str, defaults: Defaults, models: Mapping[str, RewardModel]) -> list[Manifest]:
    """The head's Service and Job. Trainers join before the driver is ready, so its address is published at once."""
    selector = build_selector(job, HEAD)
    name = child_name(job, HEAD)
    return [
        build_headless_service(job, name, selector, _PORTS, publish_not_ready=True),
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": build_metadata(job, name, selector),
            "spec": {
                "parallelism": 1,
                "completions": 1,
                "backoffLimit": job.spec.head.backoff_limit,
                "podReplacementPolicy": "Failed",  # two drivers would write one run's folder
                "podFailurePolicy": {"rules": _build_failure_rules()},
                "template": pods.build_pod_template(job, _build_parts(job, token, selector, defaults, models)),
            },
        },
    ]


def _build_failure_rules() -> list[Manifest]:
    return [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": HEAD, "operator": "In", "values": [int(ExitCode.USER)]},
        },
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _build_parts(
    job: RLJob, token: str, selector: dict[str, str], defaults: Defaults, models: Mapping[str, RewardModel]
) -> pods.PodParts:
    data = job.spec.data
    sources = [job.spec.model.source, data.train.source] + ([data.eval.source] if data.eval else [])
    return pods.PodParts(
        role=HEAD,
        spec=job.spec.head,
        spec_path="spec.head",
        image=defaults.trainer_image,
        command=["python", "-m", "rljob_trainer.head"],
        labels=selector,
        config=_read_by_head(job) | reward_refs.read_identities(job, models) | {"token": digest(token)},
        ports=_PORTS,
        env=pods.build_job_env(job, run_dir=True)
        + pods.build_env(_build_env(job, models))
        + reward_refs.build_token_env(job, models)
        + [{"name": ENV_HEAD_JOB_UID, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": _LIFE}}}],
        # No liveness probe: the driver ends by itself when it fails, and a needless kill costs all GPUs a restart.
        probes={"readinessProbe": pods.build_readiness("driver")},
        volumes=[
            pods.build_job_volume(job),
            pods.build_run_volume(job),
            pods.build_shm_volume(),
            *pods.build_claim_volumes(sources, pods.build_run_volume(job)),
        ],
        grace_seconds=_GRACE_SECONDS,
        annotations=pods.KEEP_ANNOTATIONS,
        restart_policy="Never",
    )


def _build_env(job: RLJob, models: Mapping[str, RewardModel]) -> dict[str, str]:
    data = job.spec.data
    services = {reward.name: reward_name(job, reward) for reward in job.spec.rewards if reward.is_served}
    services |= reward_refs.build_services(job, models)
    env = {
        ENV_ROLLOUT_SERVICE: child_name(job, ROLLOUT),
        ENV_REWARD_SERVICES: json.dumps(services, sort_keys=True),
        ENV_TRAIN_DATA: parse_source(data.train.source).container_path,
    }
    return env | ({ENV_EVAL_DATA: parse_source(data.eval.source).container_path} if data.eval else {})


def _read_by_head(job: RLJob) -> dict[str, Any]:
    """What must restart the driver when it changes: all that it reads but what it reads again (steps) or finds
    out by itself (who serves), and its own Pod's fields, since a Job's template cannot be changed in place."""
    spec = job.spec
    read = pods.read_settings(spec, _NOT_READ)
    return read | {
        "schedule": pods.read_settings(spec.schedule, {"steps"}),
        "trainer": pods.read_settings(spec.trainer, pods.POD_FIELDS) | {"numRanks": spec.trainer.num_ranks},
        "rollout": pods.read_settings(spec.rollout, pods.POD_FIELDS),
        "rewards": [pods.read_settings(reward, _not_read(reward)) for reward in spec.rewards],
        "head": pods.read_settings(spec.head, {"backoffLimit"}),
    }


def _not_read(reward: Reward) -> frozenset[str]:
    """A RewardModel's slots are but a hint to the driver: they restart nothing."""
    return pods.POD_FIELDS | _READ_BY_REWARD | ({"slots"} if reward.reward_model_ref else set())
