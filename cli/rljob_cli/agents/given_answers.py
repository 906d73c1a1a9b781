"""Plays an episode of a job with given answers: its user, tools, runner and rewards in their servers, and no model.

The trainer's rehearsal takes the place of the head's program, so the loop and the clients are those of training.
Invariant: when `play_answers` returns or raises, no process that it started is alive.
"""

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import LABEL_ROLE
from rljob_cli.check.waits import describe_end, describe_error, find_ended_container, report
from rljob_cli.local.cluster import LocalCluster, build_objects, running
from rljob_cli.local.network import claim_block
from rljob_cli.manifests import is_ready, labels_of, phase_of, role_of
from rljob_cli.output import say
from rljob_core.backend import Manifest
from rljob_core.children.common import AGENT, HEAD, REWARD, read_role_name

_SETTINGS = "rehearsal.json"
_KINDS = ("Secret", "ConfigMap", "Service", "Deployment", "Job")
_POLL_SECONDS = 0.05
_STOP_SECONDS = 3.0


def find_playable(job: RLJob) -> list[str]:
    """Return the names of the rewards whose servers need no model: functions, judges with an endpoint, and URLs."""
    return [r.name for r in job.spec.rewards if r.function or r.http or r.endpoint]


def play_answers(
    job: RLJob, answers: Sequence[str], folder: Path, claims: Mapping[str, Path], block: str | None
) -> None:
    """Play one episode on the first row of data.train. It is then in the trajectory log of `folder`."""
    rewards = find_playable(job)
    (folder / _SETTINGS).write_text(json.dumps({"answers": list(answers), "rewards": rewards}))
    network = claim_block(str(folder), block)
    asyncio.run(_play(LocalCluster(job, network, folder, claims), build_rehearsal(job, rewards)))


def build_rehearsal(job: RLJob, rewards: Collection[str]) -> list[Manifest]:
    """Return the job's objects without trainers, rollouts and other rewards. The head's Pod has another program."""
    names = {HEAD, *(f"{REWARD}-{name}" for name in rewards)}

    def keeps(child: Manifest) -> bool:
        labels = labels_of(child)
        return labels.get(LABEL_ROLE, AGENT) == AGENT or read_role_name(labels) in names

    kept = build_objects(job, _KINDS, f"rljob_trainer.rehearsal {_SETTINGS}", keeps)
    for child in kept:
        if child["kind"] == "Deployment":
            child["spec"]["replicas"] = 1
    return kept


async def _play(cluster: LocalCluster, children: Sequence[Manifest]) -> None:
    async with running(cluster, children, _STOP_SECONDS, report(say, partial(_describe_wait, cluster))):
        await _wait_until_played(cluster)


async def _wait_until_played(cluster: LocalCluster) -> None:
    """Raise UserError with its log if a container ends before the episode does."""
    while True:
        cluster.check()
        for pod in cluster.store.pods.values():
            if role_of(pod) == HEAD and phase_of(pod) == "Succeeded":
                return
            if ended := find_ended_container(pod):
                raise UserError((describe_error if role_of(pod) == HEAD else describe_end)(pod, ended))
        await asyncio.sleep(_POLL_SECONDS)


def _describe_wait(cluster: LocalCluster, seconds: float) -> str:
    pods = [pod for pod in cluster.store.pods.values() if role_of(pod) != HEAD]
    starting = sorted(role_of(pod) for pod in pods if not is_ready(pod))
    what = f"the start of {', '.join(starting)}" if starting else "the end of the episode"
    return f"waits for {what} ({seconds:.0f} s)"
