"""The trainer as the driver sees it: one object whose methods act on all FSDP ranks (Ray actors) at once.

Invariant: a method returns with all ranks in the same state, or raises with no rank alive, since the peers of a dead
rank would wait in a collective forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import ray
from ray.actor import ActorHandle

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import ENV_POD_IP, RAY_RESOURCE_TRAINER
from rljob_api.wire.protocol import WeightManifest
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.episodes.types import TokenFacts, TrainRow, UpdateMetrics, UpdateVersions
from rljob_trainer.policy.micro_batches import RankPlan, plan_micro_batches
from rljob_trainer.policy.update_metrics import RankMetrics
from rljob_trainer.ranks.actor import RankProcess
from rljob_trainer.ranks.failures import group_failure
from rljob_trainer.ranks.nodes import find_trainer_nodes, has_lost_node
from rljob_trainer.ranks.ray_node import ray_port
from rljob_trainer.ranks.results import UpdateCounts, scatter_facts, summarize_update

_NODE_POLL_SECONDS = 0.5
_CLOSE_TIMEOUT_SECONDS = 10
_WATCH_SECONDS = 1.0


class TrainerGroup:
    """Created by start(). Only watch() may run concurrently with another method: the others are collectives."""

    def __init__(
        self, job: RLJob, generation: str, ranks: list[ActorHandle], nodes: frozenset[str] = frozenset()
    ) -> None:
        """`nodes`: ids of the Ray nodes of `ranks`."""
        self._job, self._generation, self._ranks, self._nodes = job, generation, ranks, nodes
        self._needs = build_algorithm(job.spec).needs
        self._can_share_prompts = False
        self._update = UpdateCounts()
        self.process_ids: list[int] = []
        """By rank."""

    @classmethod
    async def start(
        cls, job: RLJob, *, model: str, generation: str, checkpoint: Path | None, report: Callable[[str], None]
    ) -> TrainerGroup:
        """Wait for the trainer Pods, place one rank per unit, and load the model or CHECKPOINT/trainer.

        `report` gets a text about what the group is waiting for; an empty string when it waits for nothing.
        """
        trainer = job.spec.trainer
        await asyncio.to_thread(connect)
        await _wait_for_nodes(trainer.num_ranks, trainer.replicas, report)
        nodes = await asyncio.to_thread(find_trainer_nodes)
        ranks = _place_ranks(trainer.num_ranks, num_gpus=1 if trainer.gpus_per_replica else 0)
        group = cls(job, generation, ranks, nodes)
        report("loads the model on the trainers")
        try:
            await group._load(model, checkpoint)
        except BaseException:
            group._kill()
            raise
        report("")
        return group

    async def inspect(self, rows: Sequence[TrainRow]) -> list[TokenFacts]:
        if not self._needs.reference and not self._needs.values:
            return [TokenFacts()] * len(rows)
        plans = await self._plan(rows, without_advantage=True)
        answers = await self._send("inspect", plans)
        return scatter_facts(rows, plans, answers)

    async def accumulate(self, rows: Sequence[TrainRow], versions: UpdateVersions) -> None:
        started = time.monotonic()
        algorithm = self._job.spec.algorithm
        has_other_terms = algorithm.kl.coefficient > 0 or algorithm.entropy_coefficient != 0 or self._needs.values
        plans = await self._plan(rows, without_advantage=has_other_terms, versions=versions)
        if plans[0]:
            await self._send("accumulate", plans)
        self._update.num_tokens += sum(int(row.loss_mask.sum()) for row in rows)
        self._update.num_micro_batches += len(plans[0])
        self._update.seconds += time.monotonic() - started

    async def apply(self, denominator: float) -> UpdateMetrics:
        started = time.monotonic()
        metrics: list[RankMetrics] = await self._broadcast("apply", denominator)
        update, self._update = self._update, UpdateCounts()
        update.seconds += time.monotonic() - started
        return summarize_update(metrics[0], update, denominator)

    async def set_steps(self, steps: int) -> None:
        await self._broadcast("set_steps", steps)

    async def publish(self, version: int) -> WeightManifest:
        manifests = await self._broadcast("publish", self._generation, version)
        return WeightManifest.model_validate(manifests[0])

    async def save(self, folder: Path) -> None:
        await self._broadcast("save", folder)

    async def export(self, folder: Path, tokenizer_source: str) -> None:
        await self._broadcast("export", folder, tokenizer_source)

    async def watch(self) -> NoReturn:
        """Raise TrainerGroupDiedError once a rank died: rollouts may need the weights that it serves at any time."""
        while True:
            # A rank that runs an update answers later; a peer of a dead rank may never answer.
            errors = await _wait_for([_future(rank.__ray_ready__.remote()) for rank in self._ranks])
            if errors and self._ranks:  # else a failed method killed them and raises the reason
                self._kill()
                raise await self._judge("watch", errors)
            await asyncio.sleep(_WATCH_SECONDS)

    async def close(self) -> None:
        """End every rank, and with rank 0 the weight server. Idempotent."""
        closing = [rank.close.remote() for rank in self._ranks]
        with contextlib.suppress(TimeoutError):  # A rank that hangs is killed below.
            async with asyncio.timeout(_CLOSE_TIMEOUT_SECONDS):
                await asyncio.gather(*map(_future, closing), return_exceptions=True)
        self._kill()

    async def _plan(
        self, rows: Sequence[TrainRow], *, without_advantage: bool, versions: UpdateVersions | None = None
    ) -> list[RankPlan]:
        return await asyncio.to_thread(
            plan_micro_batches,
            rows,
            num_ranks=self._job.spec.trainer.num_ranks,
            micro_batch_tokens=self._job.spec.trainer.micro_batch_tokens,
            share_prompts=self._can_share_prompts,
            without_advantage=without_advantage,
            versions=versions,
        )

    async def _send(self, method: str, plans: Sequence[RankPlan]) -> list[Any]:
        """Call `method` with each rank's plan. They may be large: a thread copies them to Ray's object store."""
        sent = await asyncio.to_thread(lambda: [ray.put(plan) for plan in plans])
        return await self._call_all(method, [(plan,) for plan in sent])

    async def _load(self, model: str, checkpoint: Path | None) -> None:
        described = await self._broadcast("describe")
        # Adjacent ranks share a machine, so that their collectives stay on it.
        order = sorted(range(len(described)), key=lambda i: described[i][:2])
        self._ranks, described = [self._ranks[i] for i in order], [described[i] for i in order]
        machines = [machine for machine, *_ in described]
        self.process_ids = [process_id for _, _, process_id, _ in described]
        _, address, _, port = described[0]
        calls = [
            (rank, len(order), machines.count(machine), (address, port), self._job, model, checkpoint)
            for rank, machine in enumerate(machines)
        ]
        self._can_share_prompts = all(await self._call_all("start", calls))

    async def _broadcast(self, method: str, *arguments: Any) -> list[Any]:
        return await self._call_all(method, [arguments] * len(self._ranks))

    async def _call_all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` on all ranks. The first failure kills the group, since the other ranks may never return."""
        if not self._ranks:
            raise TrainerGroupDiedError("the trainer group has ended")
        calls = [
            _future(getattr(rank, method).remote(*args)) for rank, args in zip(self._ranks, arguments, strict=True)
        ]
        try:
            if errors := await _wait_for(calls):
                self._kill()
                raise await self._judge(method, errors)
            return [call.result() for call in calls]
        except BaseException:
            # On cancellation too: some ranks may already wait in a collective.
            for call in calls:
                call.cancel()
            self._kill()
            raise

    async def _judge(self, method: str, errors: Sequence[BaseException]) -> BaseException:
        """Return the error to raise. For the group's death, find out whether it lost a node."""
        failure = group_failure(method, errors)
        if isinstance(failure, TrainerGroupDiedError):
            failure.lost_node = await has_lost_node(self._nodes)
        return failure

    def _kill(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            ray.kill(rank)


def _future(reference: Any) -> asyncio.Future[Any]:
    return asyncio.wrap_future(reference.future())


async def _wait_for(calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    """Wait until all calls have ended or one has failed. Return the errors."""
    if calls:
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
    return [error for call in calls if call.done() and (error := call.exception())]


def connect() -> None:
    """Join Ray as the driver through this Pod's node: a machine may run several."""
    if not ray.is_initialized():
        address = os.environ[ENV_POD_IP]
        ray.init(f"{address}:{ray_port()}", _node_ip_address=address, configure_logging=False)


def disconnect() -> None:
    """Leave Ray while its head still answers; later, shutdown would wait for the head."""
    ray.shutdown()


async def _wait_for_nodes(num_ranks: int, num_pods: int, report: Callable[[str], None]) -> None:
    ranks_per_pod = num_ranks // num_pods
    last_reported = -1
    while True:
        free = await asyncio.to_thread(ray.available_resources)
        num_available = int(free.get(RAY_RESOURCE_TRAINER, 0))
        if num_available >= num_ranks:
            return
        if num_available != last_reported:
            last_reported = num_available
            missing = -(-(num_ranks - num_available) // ranks_per_pod)
            report(f"waits for {missing} of {num_pods} trainer Pods to join Ray")
        await asyncio.sleep(_NODE_POLL_SECONDS)


def _place_ranks(num_ranks: int, *, num_gpus: int) -> list[ActorHandle]:
    actor = ray.remote(RankProcess).options(
        num_cpus=0, num_gpus=num_gpus, resources={RAY_RESOURCE_TRAINER: 1}, max_restarts=0, max_task_retries=0
    )
    return [cast("ActorHandle[RankProcess]", actor.remote()) for _ in range(num_ranks)]
