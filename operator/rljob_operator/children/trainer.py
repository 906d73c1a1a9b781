"""The trainers: a StatefulSet of Ray nodes for the driver's FSDP ranks, and its governing Service.

All Pods start at once (Parallel): the group works only if complete. The ranks get their settings from the driver, so a
changed algorithm or batch size restarts the head, not these Pods.
"""

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import PORT_WEIGHTS
from rljob_operator.backend import Manifest
from rljob_operator.children import pods
from rljob_operator.children.common import TRAINER, build_selector, child_name, digest
from rljob_operator.children.configuration import shared_claim
from rljob_operator.defaults import Defaults

_GRACE_SECONDS = 60


def build_trainer(job: RLJob, token: str, defaults: Defaults) -> list[Manifest]:
    name, trainer = child_name(job, TRAINER), job.spec.trainer
    shares_run = shared_claim(job) is not None  # else the ranks send their files to the head
    spec = {"replicas": trainer.replicas, "serviceName": name, "podManagementPolicy": "Parallel"}
    parts = pods.PodParts(
        role=TRAINER,
        spec=trainer,
        image=defaults.trainer_image,
        defaults=defaults,
        command=["python", "-m", "rljob_trainer.worker"],
        labels=build_selector(job, TRAINER),
        config={
            "model": pods.read_settings(job.spec.model),
            "gpusPerReplica": trainer.gpus_per_replica,
            "token": digest(token),
        },
        ports={"weights": PORT_WEIGHTS},
        env=pods.build_job_env(job, run_dir=shares_run),
        # No probes: only rank 0 serves requests, and the driver knows which nodes have joined.
        volumes=pods.build_job_volumes(job, [job.spec.model.source], run_dir=shares_run),
        grace_seconds=_GRACE_SECONDS,
        gpus=trainer.gpus_per_replica,
        annotations=pods.KEEP_ANNOTATIONS,
    )
    return pods.build_workload(job, "StatefulSet", name, parts, spec, publish_not_ready=True)
