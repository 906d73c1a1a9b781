"""The trainers: a StatefulSet of Ray nodes that the driver's FSDP ranks live on, and its governing Service.

All start at once (Parallel): the group is useful only when whole. The ranks take their settings from the driver,
so a change of the algorithm or of a batch size restarts the head, not these Pods.
"""

from __future__ import annotations

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import PORT_WEIGHTS
from rljob_operator.backend import Manifest
from rljob_operator.children import pods
from rljob_operator.children.common import (
    TRAINER,
    build_headless_service,
    build_metadata,
    build_selector,
    child_name,
    digest,
)
from rljob_operator.defaults import Defaults

_PORTS = {"weights": PORT_WEIGHTS}
_GRACE_SECONDS = 60


def build_trainer(job: RLJob, token: str, defaults: Defaults) -> list[Manifest]:
    """The trainers' Service and StatefulSet."""
    selector = build_selector(job, TRAINER)
    name = child_name(job, TRAINER)
    return [
        build_headless_service(job, name, selector, _PORTS, publish_not_ready=True),
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": build_metadata(job, name, selector),
            "spec": {
                "replicas": job.spec.trainer.replicas,
                "serviceName": name,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": selector},
                "template": pods.build_pod_template(job, _build_parts(job, token, selector, defaults)),
            },
        },
    ]


def _build_parts(job: RLJob, token: str, selector: dict[str, str], defaults: Defaults) -> pods.PodParts:
    trainer = job.spec.trainer
    return pods.PodParts(
        role=TRAINER,
        spec=trainer,
        spec_path="spec.trainer",
        image=defaults.trainer_image,
        command=["python", "-m", "rljob_trainer.worker"],
        labels=selector,
        config={
            "model": pods.read_settings(job.spec.model),
            "gpusPerReplica": trainer.gpus_per_replica,
            "token": digest(token),
        },
        ports=_PORTS,
        env=pods.build_job_env(job, run_dir=True),
        # No probes: only rank 0 serves anything, and whether a node has joined is known to the driver.
        volumes=[
            pods.build_job_volume(job),
            pods.build_run_volume(job),
            pods.build_shm_volume(),
            *pods.build_claim_volumes([job.spec.model.source], pods.build_run_volume(job)),
        ],
        grace_seconds=_GRACE_SECONDS,
        gpus=trainer.gpus_per_replica,
        annotations=pods.KEEP_ANNOTATIONS,
    )
