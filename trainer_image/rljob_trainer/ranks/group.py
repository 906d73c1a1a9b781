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
from rljob_trainer.policy.layout import PLAIN, RankRows, divide_rows
from rljob_trainer.policy.update_metrics import RankMetrics
from rljob_trainer.ranks.actor import SAVES, RankProcess
from rljob_trainer.ranks.failures import group_failure
from rljob_trainer.ranks.nodes import find_trainer_nodes, has_lost_node
from rljob_trainer.ranks.ray_node import ray_port
from rljob_trainer.ranks.results import UpdateCounts, scatter_facts, summarize_update
from rljob_trainer.run_folder.location import RunFolder

_NODE_POLL_SECONDS = 0.5
_CLOSE_TIMEOUT_SECONDS = 10
_SAVE_TIMEOUT_SECONDS = 20
"""For which a group that must end lets its ranks write on: the driver's part of a Pod's grace period is 45 s."""
_WATCH_SECONDS = 1.0


class TrainerGroup:
    """Created by start(). Only watch() and saved() may run concurrently with another method: the others are
    collectives."""

    def __init__(
        self, job: RLJob, generation: str, ranks: list[ActorHandle], nodes: frozenset[str] = frozenset()
    ) -> None:
        """`nodes`: ids of the Ray nodes of `ranks`."""
        self._job, self._generation, self._ranks, self._nodes = job, generation, ranks, nodes
        self._needs = build_algorithm(job.spec).needs
        self._layout = PLAIN
        self._update = UpdateCounts()
        self._is_saving = False
        """Whether ranks may be writing a checkpoint. They end with the group, and the checkpoint with them."""
        self.process_ids: list[int] = []
        """By rank."""

    @classmethod
    async def start(
        cls,
        job: RLJob,
        *,
        model: str,
        run: RunFolder,
        generation: str,
        checkpoint: Path | None,
        report: Callable[[str], None],
    ) -> TrainerGroup:
        """Wait for the trainer Pods, place one rank per unit, and load the model or CHECKPOINT/trainer.

        `run`: the run's folder, in which all checkpoints and the export are. `report` gets a text about what the group
        is waiting for; an empty string when it waits for nothing.
        """
        trainer = job.spec.trainer
        await asyncio.to_thread(connect)
        await _wait_for_nodes(trainer.num_ranks, trainer.replicas, report)
        nodes = await asyncio.to_thread(find_trainer_nodes)
        ranks = _place_ranks(trainer.num_ranks, num_gpus=1 if trainer.gpus_per_replica else 0)
        group = cls(job, generation, ranks, nodes)
        report("loads the model on the trainers")
        try:
            await group._load(model, run, checkpoint)
        except BaseException:
            group._kill()
            raise
        report("")
        return group

    async def inspect(self, rows: Sequence[TrainRow]) -> list[TokenFacts]:
        if not self._needs.reference and not self._needs.values:
            return [TokenFacts()] * len(rows)
        parts = await self._divide(rows, without_advantage=True)
        return scatter_facts(rows, await self._send("inspect", parts))

    async def accumulate(self, rows: Sequence[TrainRow], versions: UpdateVersions) -> None:
        started = time.monotonic()
        algorithm = self._job.spec.algorithm
        has_other_terms = algorithm.kl.coefficient > 0 or algorithm.entropy_coefficient != 0 or self._needs.values
        parts = await self._divide(rows, without_advantage=has_other_terms, versions=versions)
        if parts[0].batches:
            await self._send("accumulate", parts)
        self._update.num_tokens += sum(int(row.loss_mask.sum()) for row in rows)
        self._update.num_micro_batches += len(parts[0].batches)
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
        self._is_saving = True
        await self._broadcast("save", folder)

    async def saved(self) -> None:
        if not self._ranks:
            raise TrainerGroupDiedError("the trainer group has ended")
        # A failure ends no rank: what runs meanwhile would then report lost ranks, and hide the reason.
        if errors := await self._wait_for_save():
            raise await self._judge("save", errors)
        self._is_saving = False

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

    async def _divide(
        self, rows: Sequence[TrainRow], *, without_advantage: bool, versions: UpdateVersions | None = None
    ) -> list[RankRows]:
        return await asyncio.to_thread(
            divide_rows,
            rows,
            num_ranks=self._job.spec.trainer.num_ranks,
            micro_batch_tokens=self._job.spec.trainer.micro_batch_tokens,
            layout=self._layout,
            without_advantage=without_advantage,
            versions=versions,
        )

    async def _send(self, method: str, parts: Sequence[RankRows]) -> list[Any]:
        """Call `method` with each rank's rows. They may be large: a thread copies them to Ray's object store."""
        sent = await asyncio.to_thread(lambda: [ray.put(part) for part in parts])
        return await self._call_all(method, [(part,) for part in sent])

    async def _load(self, model: str, run: RunFolder, checkpoint: Path | None) -> None:
        described = await self._broadcast("describe")
        # Adjacent ranks share a machine, so that their collectives stay on it, and a Pod, which may have its own copy
        # of the state (sharding.build_mesh).
        order = sorted(range(len(described)), key=lambda i: described[i][:2])
        self._ranks, described = [self._ranks[i] for i in order], [described[i] for i in order]
        machines = [machine for machine, *_ in described]
        self.process_ids = [process_id for _, _, process_id, _ in described]
        _, address, _, port = described[0]
        calls = [
            (rank, len(order), machines.count(machine), (address, port), self._job, model, run, checkpoint)
            for rank, machine in enumerate(machines)
        ]
        # The same on all ranks: they have the same model and the same kind of device.
        self._layout, *_ = await self._call_all("start", calls)

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
                await self._end()
                raise await self._judge(method, errors)
            return [call.result() for call in calls]
        except BaseException:
            # On cancellation too: some ranks may already wait in a collective.
            for call in calls:
                call.cancel()
            await self._end()
            raise

    async def _wait_for_save(self) -> list[BaseException]:
        return await _wait_for([_future(rank.wait_for_save.remote()) for rank in self._ranks])

    async def _end(self) -> None:
        """Kill the ranks, after they have written the last checkpoint if that is quick. A dead rank cannot: its error
        ends the wait."""
        if self._is_saving:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SAVE_TIMEOUT_SECONDS):
                    await self._wait_for_save()
        self._kill()

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
    build: Any = ray.remote(concurrency_groups={SAVES: 1})  # type: ignore[call-overload]  # not in its types
    actor = build(RankProcess).options(
        num_cpus=0, num_gpus=num_gpus, resources={RAY_RESOURCE_TRAINER: 1}, max_restarts=0, max_task_retries=0
    )
    return [cast("ActorHandle[RankProcess]", actor.remote()) for _ in range(num_ranks)]
