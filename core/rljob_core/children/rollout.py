"""The rollouts: a Deployment of vLLM servers, and the headless Service through which the driver finds ready replicas.

Ready means that a replica serves current weights. Loading takes minutes, so a change of settings that only the driver
reads (sampling, timeouts) restarts no rollout.
"""

from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import PORT_ROLLOUT
from rljob_core.backend import Manifest
from rljob_core.children import pods
from rljob_core.children.common import ROLLOUT, build_selector, child_name, digest
from rljob_core.children.configuration import read_settings
from rljob_core.children.env import build_job_env
from rljob_core.children.keep import ANNOTATION_READ_ONCE
from rljob_core.children.pods import build_probes
from rljob_core.children.start_model import locate_model
from rljob_core.children.volumes import build_job_volumes
from rljob_core.defaults import Defaults

_FAILURE_THRESHOLD = 6
"""Each weight sync makes a replica unready for a moment, and consecutive probes may hit such moments. The driver checks
the weight version of a replica before it uses it, so no stale replica serves."""
_GRACE_SECONDS = 60
_PRE_STOP_SECONDS = 10
"""The driver may still send requests for this long after a terminating replica has left the Service."""
_READ_BY_DRIVER = {"sampling", "stallTimeoutSeconds", "weightTransfer"}


def build_rollout(job: RLJob, token: str, defaults: Defaults) -> list[Manifest]:
    rollout = job.spec.rollout
    spec = {
        "replicas": rollout.replicas,
        # No surge: GPUs for one more replica are rarely free.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
    }
    parts = pods.PodParts(
        role=ROLLOUT,
        spec=rollout,
        image=defaults.trainer_image,
        defaults=defaults,
        command=["python", "-m", "rljob_trainer.rollout"],
        labels=build_selector(job, ROLLOUT),
        config=read_by_engine(job) | {"token": digest(token)},
        read_again={ANNOTATION_READ_ONCE: ("hangDetection",)},
        ports={"http": PORT_ROLLOUT},
        env=build_job_env(job, run_dir=False),
        probes=build_probes("http", job.spec.rollout_startup_seconds, _FAILURE_THRESHOLD),
        volumes=build_job_volumes(job, defaults, [locate_model(job)], run_dir=False),
        container_security=pods.build_root_security(defaults),
        grace_seconds=_GRACE_SECONDS + _PRE_STOP_SECONDS,
        drain_seconds=_PRE_STOP_SECONDS,
        gpus=rollout.gpus_per_replica,
    )
    return pods.build_workload(job, "Deployment", child_name(job, ROLLOUT), parts, spec)


def read_by_engine(job: RLJob) -> dict[str, Any]:
    """What vLLM's program reads at its start, in Pods of its own or in the trainer's."""
    rollout, trainer = job.spec.rollout, job.spec.trainer
    return {
        "model": read_settings(job.spec.model),
        "rollout": read_settings(rollout, pods.POD_FIELDS | _READ_BY_DRIVER),
        "dtype": trainer.dtype,
        **({} if job.spec.trains else {"task": job.spec.task}),
        **({} if trainer.head_dtype == "model" else {"headDtype": trainer.head_dtype}),
        "maxStaleness": job.spec.schedule.staleness,
        "seed": job.spec.schedule.seed,
        **({"hangDetection": hang} if (hang := read_settings(job.spec.hang_detection)) else {}),
        **({"chatTemplateArguments": arguments} if (arguments := job.spec.data.chat_template_arguments) else {}),
    }
