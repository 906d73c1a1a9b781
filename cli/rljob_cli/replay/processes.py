"""Runs the program of a replay on this machine: a head with another program, and trainers. No rollouts, no services.

Invariant: when `run_replay` returns or raises, no process that it started is alive.
"""

import asyncio
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import StepRecord
from rljob_api.wire.contract import LABEL_ROLE, ExitCode
from rljob_cli.check.waits import find_ended_container
from rljob_cli.local.cluster import STOP_SECONDS, LocalCluster, build_objects, running
from rljob_cli.local.network import Network
from rljob_cli.manifests import labels_of, role_of
from rljob_cli.replay.plan import ReplayPlan
from rljob_cli.run.runfolder import MetricsReader
from rljob_core.backend import Manifest
from rljob_core.children.common import HEAD, TRAINER
from rljob_core.plan.observed_job import name_of

_SETTINGS = "replay.json"
_KINDS = ("Secret", "ConfigMap", "Service", "StatefulSet", "Job")
_POLL_SECONDS = 0.2

Show = Callable[[StepRecord], None]


def run_replay(
    job: RLJob,
    run: Path,
    plan: ReplayPlan,
    folder: Path,
    network: Network,
    claims: Mapping[str, Path],
    show: Show,
) -> None:
    """Train on the steps of `run`; the records are then in `folder`. `show` gets each step when it has ended. Raise the
    error that ends the program."""
    settings = {"run": str(run), "checkpoint": plan.checkpoint, "steps": list(plan.steps)}
    (folder / _SETTINGS).write_text(json.dumps(settings))
    job = job.model_copy(update={"spec": separate(job.spec)})
    asyncio.run(_run(LocalCluster(job, network, folder, claims), list_objects(job), folder, show))


def list_objects(job: RLJob) -> list[Manifest]:
    """Return the job's objects without rollouts and services. The head's Pod has another program."""

    def keeps(child: Manifest) -> bool:
        return labels_of(child).get(LABEL_ROLE, HEAD) in (HEAD, TRAINER)

    return build_objects(job, _KINDS, f"rljob_trainer.replay {_SETTINGS}", keeps)


def separate(spec: RLJobSpec) -> RLJobSpec:
    """Return the spec without engines in the trainer's Pods, which a replay does not ask."""
    spec = spec.model_copy(deep=True)
    for model in spec.models_in_trainer.values():
        model.placement = "separate"
    spec.rollout.placement, spec.rollout.weight_transfer = "separate", "file"
    return spec


async def _run(cluster: LocalCluster, objects: Sequence[Manifest], folder: Path, show: Show) -> None:
    reader, shown, has_ended = MetricsReader(folder / FILE_METRICS), 0, False  # the last step that was shown
    async with running(cluster, objects, STOP_SECONDS, signals=(signal.SIGTERM, signal.SIGHUP)):
        while not has_ended:
            has_ended = _has_ended(cluster)
            for record in [each for each in reader.read().steps if each.step > shown]:
                show(record)
                shown = record.step
            await asyncio.sleep(0 if has_ended else _POLL_SECONDS)


def _has_ended(cluster: LocalCluster) -> bool:
    """Whether the program has succeeded. Raise why it or a trainer ended, unless another attempt may help: the head's
    Job and the trainers' StatefulSet then start one."""
    cluster.check()
    [head] = cluster.store.of_kind("Job")
    if (head.get("status") or {}).get("succeeded"):
        return True
    for pod in cluster.store.pods.values():
        if ended := find_ended_container(pod):
            message = (ended["message"] or "it printed nothing").strip().removeprefix("error: ")
            if ended["exitCode"] == ExitCode.USER:
                raise UserError(message)
            if role_of(pod) == HEAD and (head.get("status") or {}).get("conditions"):
                raise TransientError(f"{name_of(pod)} ended with exit code {ended['exitCode']}: {message}")
    return False
