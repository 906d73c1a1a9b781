"""The head: a Job with one Pod (Ray head, driver, agent loops, gateway), and its Service.

It is a Job because only the head ends; its success is the success of the RLJob. Exit code 78 (user error) is never
retried. All other failures are, until the operator finds that they exceed head.backoffLimit: a Job's own limit has no
window, and counts Pods that a node refused.
"""

import json
from collections.abc import Mapping
from typing import Any

from rljob_api.manifest.agent import Agent
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.schedule import MUTABLE_SCHEDULE_FIELDS
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.manifest.sources import parse_source
from rljob_api.wire import contract
from rljob_core.backend import Manifest
from rljob_core.children import pods, reward_refs
from rljob_core.children.common import (
    DISRUPTION_CONDITIONS,
    HEAD,
    ROLLOUT,
    TRAINER,
    build_selector,
    child_name,
    digest,
    service_name,
)
from rljob_core.children.configuration import RETRY_FIELDS, read_settings
from rljob_core.children.env import build_env, build_field_env, build_grace_env, build_job_env, build_tracing_env
from rljob_core.children.keep import ANNOTATION_AT_START, ANNOTATION_READ_ONCE
from rljob_core.children.pods import build_probes
from rljob_core.children.start_model import locate_model
from rljob_core.children.volumes import build_job_volumes
from rljob_core.defaults import Defaults

_STARTUP_SECONDS = 600
"""The driver listens after its first imports, before it reads data or starts Ray."""
_UNLIMITED = 2**31 - 1
_HEAD_JOB_UID_FIELD = "metadata.labels['batch.kubernetes.io/controller-uid']"
"""The uid of the head's Job. It stays when a Pod is replaced, and changes when a user restarts the job."""
_NOT_READ = (
    *("scheduling", "suspend", "managedBy", "activeDeadlineSeconds", "progressDeadlineSeconds"),
    *("ttlSecondsAfterFinished", "head"),
)
"""Fields of spec that the driver does not read."""
_READ_AGAIN_BY_0_2 = ("outageSeconds", "checkpoint.everySteps", "checkpoint.keep", "tracking.trajectoriesSize")
_READ_AGAIN = {
    ANNOTATION_AT_START: _READ_AGAIN_BY_0_2,
    ANNOTATION_READ_ONCE: (
        *_READ_AGAIN_BY_0_2,
        "hangDetection",
        "rollout.sampling.temperature",
        "rollout.sampling.stop",
    ),
}
"""Fields that the driver reads again, as those of the schedule."""
_READ_BY_REWARD = {"function", "mcp", "model", "judge", "queueLength"}
"""Fields of a reward that only its server reads."""
_READ_BY_RUNNER = {"command", "workingDir", "network"}
"""Further fields of a runner that only its server reads."""


def build_head(job: RLJob, token: str, defaults: Defaults, models: Mapping[str, RewardModel]) -> list[Manifest]:
    """The head's Service and Job. Trainers join before the driver is ready, so the Service publishes it earlier."""
    spec: Manifest = {
        "parallelism": 1,
        "completions": 1,
        "backoffLimit": _UNLIMITED,
        "podReplacementPolicy": "Failed",  # two drivers must not write to the same run folder
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": HEAD, "operator": "In", "values": [int(contract.ExitCode.USER)]},
                },
                *(
                    {"action": "Ignore", "onPodConditions": [{"type": type_, "status": "True"}]}
                    for type_ in DISRUPTION_CONDITIONS
                ),
            ]
        },
    }
    parts = _build_parts(job, token, defaults, models)
    return pods.build_workload(job, "Job", child_name(job, HEAD), parts, spec, publish_not_ready=True)


def _build_parts(job: RLJob, token: str, defaults: Defaults, models: Mapping[str, RewardModel]) -> pods.PodParts:
    spec = job.spec
    read = _read_by_head(job) | reward_refs.read_identities(job, models) | {"token": digest(token)}
    sources = [locate_model(job), *(each.source.source for each in spec.data.train_sources)]
    sources += [each.data.source for each in spec.held_out_sets]
    return pods.PodParts(
        role=HEAD,
        spec=spec.head,
        image=defaults.trainer_image,
        defaults=defaults,
        command=["python", "-m", "rljob_trainer.tinker" if spec.service else "rljob_trainer.head"],
        labels=build_selector(job, HEAD),
        config=read,
        read_again=_READ_AGAIN if spec.trains and not spec.service else {},
        ports={"ray": contract.PORT_RAY, "driver": contract.PORT_DRIVER, "run-files": contract.PORT_RUN_FILES}
        | ({"gateway": contract.PORT_GATEWAY} if spec.agent.is_hosted else {})
        | ({"clients": contract.PORT_CLIENTS} if spec.service else {}),
        env=build_job_env(job, run_dir=True)
        + build_grace_env(spec.head.template)
        + build_env(_build_env(job, models))
        + reward_refs.build_token_env(job, models)
        + _build_key_env(job)
        + build_tracing_env(job)
        + [build_field_env(contract.ENV_HEAD_JOB_UID, _HEAD_JOB_UID_FIELD)],
        probes=build_probes("driver", _STARTUP_SECONDS),
        volumes=build_job_volumes(job, defaults, sources, run_dir=True),
        container_security=pods.build_root_security(defaults),
        grace_seconds=contract.GRACE_SECONDS,
        annotations=pods.KEEP_ANNOTATIONS,
        restart_policy="Never",
    )


def _build_env(job: RLJob, models: Mapping[str, RewardModel]) -> dict[str, str]:
    services = {each.settings.name: service_name(job, each) for each in job.spec.services if each.settings.is_served}
    services |= reward_refs.build_services(job, models)
    env = {
        # The engines in trainer Pods serve only in their turn, so that Service also has Pods that are not ready.
        contract.ENV_ROLLOUT_SERVICE: child_name(job, TRAINER if job.spec.shares_trainer else ROLLOUT),
        contract.ENV_REWARD_SERVICES: json.dumps(services, sort_keys=True),
    }
    train, *others = [parse_source(each.source.source).container_path for each in job.spec.data.train_sources] or [""]
    env |= ({contract.ENV_TRAIN_DATA: train} if train else {}) | (
        {contract.ENV_MIX_DATA: json.dumps(others)} if others else {}
    )
    held_out = {each.name: parse_source(each.data.source).container_path for each in job.spec.held_out_sets}
    return env | ({contract.ENV_EVAL_DATA: json.dumps(held_out)} if held_out else {})


def _build_key_env(job: RLJob) -> list[Manifest]:
    """The keys of the models that programs call through the gateway."""
    references = [model.api_key_secret_ref for model in job.spec.agent.models]
    return [
        {"name": f"{contract.ENV_MODEL_API_KEY}{index}", "valueFrom": {"secretKeyRef": reference.to_manifest()}}
        for index, reference in enumerate(references)
        if reference is not None
    ]


def _read_by_head(job: RLJob) -> dict[str, Any]:
    """What is recorded of the head: all that the driver reads except for the schedule, which it reads again, and
    replicas, which it discovers, and the fields of the head's Pod, because the template of a Job is immutable."""
    spec = job.spec
    read = read_settings(spec, {*_NOT_READ, "agent", "evaluation"})
    return read | {
        **({"service": read_settings(spec.service, {"clients"})} if spec.service else {}),  # it reads these again
        "schedule": read_settings(spec.schedule, set(MUTABLE_SCHEDULE_FIELDS)),
        "trainer": read_settings(spec.trainer, pods.POD_FIELDS) | {"numRanks": spec.trainer.num_ranks},
        "rollout": read_settings(spec.rollout, pods.POD_FIELDS),
        **({"evaluation": evaluation} if (evaluation := read_settings(spec.evaluation, ())) else {}),
        # The slots of a RewardModel are only a hint to the driver, so they restart nothing.
        "rewards": [
            read_settings(each, pods.POD_FIELDS | _READ_BY_REWARD | ({"slots"} if each.reward_model_ref else set()))
            for each in spec.rewards
        ],
        "head": read_settings(spec.head, RETRY_FIELDS),
        **_read_agent(spec.agent),
    }


def _read_agent(agent: Agent) -> dict[str, Any]:
    """Nothing for the default: the digests of jobs with single turns stay. What servers execute is read by them."""
    settings = read_settings(agent, {"user", "tools", "environment", "runner"})
    if agent.turn_limit == agent.model_copy(update={"max_assistant_turns": None}).turn_limit:  # what null means
        settings.pop("maxAssistantTurns", None)
    not_read = pods.POD_FIELDS | _READ_BY_REWARD
    if agent.user:
        settings["user"] = read_settings(agent.user, not_read)
    if agent.tools:
        settings["tools"] = [read_settings(tool, not_read) for tool in agent.tools]
    if agent.runner:
        settings["runner"] = read_settings(agent.runner, not_read | _READ_BY_RUNNER)
    return {"agent": settings} if settings else {}
