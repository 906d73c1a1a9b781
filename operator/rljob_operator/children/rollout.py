"""The rollouts: a Deployment of vLLM servers and the headless Service by which the driver finds the ready ones.

Ready means 'serves current weights'. A change of what only the driver reads (sampling, time-outs) restarts nothing
here: a replica takes minutes to load.
"""

from __future__ import annotations

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import PORT_ROLLOUT
from rljob_operator.backend import Manifest
from rljob_operator.children import pods
from rljob_operator.children.common import (
    ROLLOUT,
    build_headless_service,
    build_metadata,
    build_selector,
    child_name,
    digest,
)
from rljob_operator.defaults import Defaults

_PORTS = {"http": PORT_ROLLOUT}
_STARTUP_SECONDS = 600
"""vLLM loads and compiles before it opens its port."""
_FAILURE_THRESHOLD = 6
"""Each update makes a replica stale for a moment, and two probes in a row may meet two such moments. Nobody is served
by a replica that is behind for longer: the driver asks each for its version before it uses it."""
_GRACE_SECONDS = 60
_PRE_STOP_SECONDS = 10
"""A replica that goes is out of the Service at once; so long the driver may still send it requests."""
_READ_BY_DRIVER = {"sampling", "requestTimeoutSeconds"}


def build_rollout(job: RLJob, token: str, defaults: Defaults) -> list[Manifest]:
    """The rollouts' Service and Deployment."""
    selector = build_selector(job, ROLLOUT)
    name = child_name(job, ROLLOUT)
    return [
        build_headless_service(job, name, selector, _PORTS, publish_not_ready=False),
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": build_metadata(job, name, selector),
            "spec": {
                "replicas": job.spec.rollout.replicas,
                # No surge: there are seldom spare GPUs for one more replica.
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
                "selector": {"matchLabels": selector},
                "template": pods.build_pod_template(job, _build_parts(job, token, selector, defaults)),
            },
        },
    ]


def _build_parts(job: RLJob, token: str, selector: dict[str, str], defaults: Defaults) -> pods.PodParts:
    rollout = job.spec.rollout
    return pods.PodParts(
        role=ROLLOUT,
        spec=rollout,
        spec_path="spec.rollout",
        image=defaults.trainer_image,
        command=["python", "-m", "rljob_trainer.rollout"],
        labels=selector,
        config={
            "model": pods.read_settings(job.spec.model),
            "rollout": pods.read_settings(rollout, pods.POD_FIELDS | _READ_BY_DRIVER),
            "dtype": job.spec.trainer.dtype,
            "maxStaleness": job.spec.schedule.max_staleness,
            "seed": job.spec.schedule.seed,
            "token": digest(token),
        },
        ports=_PORTS,
        env=pods.build_job_env(job, run_dir=False),
        probes=pods.build_probes("http", _STARTUP_SECONDS, _FAILURE_THRESHOLD),
        volumes=[
            pods.build_job_volume(job),
            pods.build_shm_volume(),
            *pods.build_claim_volumes([job.spec.model.source]),
        ],
        grace_seconds=_GRACE_SECONDS + _PRE_STOP_SECONDS,
        drain_seconds=_PRE_STOP_SECONDS,
        gpus=rollout.gpus_per_replica,
    )
