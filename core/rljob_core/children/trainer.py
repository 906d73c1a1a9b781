"""The trainers: a StatefulSet of Ray nodes for the driver's FSDP ranks, and a Service if they run engines.

All Pods start at once (Parallel): the group works only if complete. The ranks get their settings from the driver, so a
changed algorithm or batch size restarts the head, not these Pods. With rollout.placement trainer, the Pods also run the
rollouts, and served models with this placement, so what these read at their start replaces the Pods, too.
"""

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.pod_engines import find_engines
from rljob_api.quantity import format_bytes, parse_quantity
from rljob_api.wire.contract import GRACE_SECONDS, PORT_ROLLOUT, PORT_WEIGHTS
from rljob_core.backend import Manifest
from rljob_core.children import pods
from rljob_core.children.common import TRAINER, build_selector, child_name, digest
from rljob_core.children.configuration import read_settings, shared_claim
from rljob_core.children.env import build_grace_env, build_job_env
from rljob_core.children.keep import ANNOTATION_READ_ONCE
from rljob_core.children.rollout import read_by_engine
from rljob_core.children.start_model import locate_model
from rljob_core.children.vllm_sidecar import build_engines_env
from rljob_core.children.volumes import build_job_volumes
from rljob_core.defaults import Defaults


def build_trainer(job: RLJob, token: str, defaults: Defaults) -> list[Manifest]:
    name, trainer = child_name(job, TRAINER), job.spec.trainer
    shares_run = shared_claim(job) is not None  # else the ranks send their files to the head
    sources = [locate_model(job), *(model.source for model in job.spec.models_in_trainer.values())]
    spec = {"replicas": trainer.replicas, "serviceName": name, "podManagementPolicy": "Parallel"}
    parts = pods.PodParts(
        role=TRAINER,
        spec=trainer,
        image=defaults.trainer_image,
        defaults=_with_engines(defaults, len(find_engines(job.spec))),
        command=["python", "-m", "rljob_trainer.worker"],
        labels=build_selector(job, TRAINER),
        config={
            "model": read_settings(job.spec.model),
            "gpusPerReplica": trainer.gpus_per_replica,
            "token": digest(token),
            **({"engine": read_by_engine(job)} if job.spec.shares_trainer else {}),
            **(
                {"models": models}
                if (models := {path: read_settings(each) for path, each in job.spec.models_in_trainer.items()})
                else {}
            ),
        },
        read_again={ANNOTATION_READ_ONCE: ("engine.hangDetection",)},
        ports={"weights": PORT_WEIGHTS} | name_engine_ports(job),
        env=build_job_env(job, run_dir=shares_run) + build_engines_env(job) + build_grace_env(trainer.template),
        # No probes: only rank 0 serves requests, and the driver knows which nodes have joined.
        volumes=build_job_volumes(job, defaults, sources, run_dir=shares_run),
        container_security=pods.build_root_security(defaults),
        grace_seconds=GRACE_SECONDS,
        gpus=trainer.gpus_per_replica,
        annotations=pods.KEEP_ANNOTATIONS,
    )
    service, workload = pods.build_workload(job, "StatefulSet", name, parts, spec, publish_not_ready=True)
    return [service, workload] if find_engines(job.spec) else [workload]  # ranks know each other by address


def _with_engines(defaults: Defaults, num_engines: int) -> Defaults:
    """The defaults for a Pod that also runs so many rollouts: the sums of requests, and of limits that both have."""
    if not num_engines:
        return defaults
    resources = defaults.resources
    trainer, rollout = resources.trainer, resources.rollout
    requests = {
        name: _add(trainer.requests.get(name, "0"), rollout.requests.get(name, "0"), num_engines)
        for name in {**trainer.requests, **rollout.requests}
    }
    limits = {
        name: _add(trainer.limits[name], rollout.limits[name], num_engines)
        for name in trainer.limits
        if name in rollout.limits
    }
    whole = trainer.model_copy(update={"requests": requests, "limits": limits})
    return defaults.model_copy(update={"resources": resources.model_copy(update={"trainer": whole})})


def _add(trainer: str, rollout: str, num_engines: int) -> str:
    own, engine = parse_quantity(trainer), parse_quantity(rollout)
    assert own is not None, trainer
    assert engine is not None, rollout
    total = own + num_engines * engine
    return format_bytes(int(total)) if total % 1024 == 0 else f"{total.normalize():f}"


def name_engine_ports(job: RLJob) -> dict[str, int]:
    """The ports of the engines in each Pod: http, http-1, http-2. The chart's PodMonitor scrapes the first eight."""
    numbers = [engine.number for engine in find_engines(job.spec)]
    return {f"http-{number}" if number else "http": PORT_ROLLOUT + number for number in numbers}
