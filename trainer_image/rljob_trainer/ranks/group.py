"""The trainer as the driver sees it: one object whose methods act on all FSDP ranks (Ray actors) at once.

Invariant: a method returns with all ranks in the same state, or raises with no rank alive, since the peers of a dead
rank would wait in a collective forever.

A rank has failed only if its node still exists. Otherwise its Pod was evicted or restarted, which the operator judges:
no end counts twice, and a drain does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle

from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.wire.contract import ENV_POD_IP, PORT_RAY, RAY_RESOURCE_TRAINER
from rljob_api.wire.discovery import listening_port
from rljob_api.wire.driver_status import TrainerChoices
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.concurrency import run_with_watcher
from rljob_trainer.driver.ports import FreedMemory, TrainerGroupDiedError
from rljob_trainer.episodes.types import TokenFacts, TrainRow, UpdateMetrics, UpdateVersions
from rljob_trainer.history.disk import find_disk_error
from rljob_trainer.liveness.judge import Judge, Pace
from rljob_trainer.policy.layout import PLAIN, RankRows, divide_rows
from rljob_trainer.policy.update_metrics import RankMetrics
from rljob_trainer.ranks.failures import group_failure
from rljob_trainer.ranks.rank_watch import (
    Heartbeats,
    HungRanks,
    RankWatch,
    describe_silent,
    future,
    hung_error,
    log_stacks,
    wait_for,
)
from rljob_trainer.ranks.ray_node import is_listening
from rljob_trainer.ranks.remote import build_actor
from rljob_trainer.ranks.results import RankFacts, UpdateCounts, scatter_facts, summarize_update
from rljob_trainer.run_folder.client import RunFolder
from rljob_trainer.run_folder.file_facts import Checkpoint, FileFacts

SETTLE_SECONDS = 5.0
"""A Pod that is deleted ends its rank and its raylet at about the same time; either may be noticed first."""
_POLL_SECONDS = 0.5

Node = dict[str, Any]
"""As ray.nodes() describes it."""


def find_trainer_nodes() -> frozenset[str]:
    """Return the ids of the nodes that offer ranks."""
    nodes = (node for node in ray.nodes() if node["Alive"] and RAY_RESOURCE_TRAINER in node["Resources"])
    return frozenset(str(node["NodeID"]) for node in nodes)


async def has_lost_node(members: frozenset[str], settle_seconds: float = SETTLE_SECONDS) -> bool:
    """Whether one of these nodes no longer exists, or disappears within `settle_seconds`."""
    deadline = time.monotonic() + settle_seconds
    while not await asyncio.to_thread(lambda: is_any_lost(members, ray.nodes(), is_raylet_listening)):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True


def is_any_lost(members: frozenset[str], nodes: Iterable[Node], is_listening: Callable[[Node], bool]) -> bool:
    """Ray takes 15 s and more to notice that a raylet was killed, its port only a moment."""
    alive = {str(node["NodeID"]): node for node in nodes if node["Alive"]}
    return any(member not in alive or not is_listening(alive[member]) for member in sorted(members))


def is_raylet_listening(node: Node) -> bool:
    return is_listening(node["NodeManagerAddress"], node["NodeManagerPort"])


log = logging.getLogger(__name__)

_NODE_POLL_SECONDS = 0.5
_CLOSE_TIMEOUT_SECONDS = 10
_SAVE_TIMEOUT_SECONDS = 20
"""For which a group that must end lets its ranks write on: the driver's part of a Pod's grace period is 45 s."""
_FINISH_SECONDS = 10
"""For which a cancelled call may run on."""
_WATCH_SECONDS = 1.0
_REPEATABLE = ("save", "export")
"""They write files, and change no state of a rank."""


class TrainerGroup:
    """Created by start(). Only watch() and saved() may run concurrently with another method: the others are
    collectives. While weights are offered, watch() runs collectives, too, between those."""

    def __init__(
        self,
        job: RLJob,
        generation: str,
        ranks: list[ActorHandle],
        nodes: frozenset[str] = frozenset(),
        *,
        pace: Pace | None = None,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """`nodes`: ids of the Ray nodes of `ranks`. `pace`: of the groups before. `is_paused`: whether the job waits
        for an outage to end, for which no rank is to blame."""
        self._job, self._generation, self._ranks, self._nodes = job, generation, ranks, nodes
        self._ended = asyncio.Event()
        self._needs = build_algorithm(job.spec).needs
        self._layout = PLAIN
        self._update = UpdateCounts()
        self._is_saving = False
        """Whether ranks may be writing a checkpoint. They end with the group, and the checkpoint with them."""
        self._watch = RankWatch(Judge(pace or Pace(job.spec.hang_detection), time.monotonic()))
        self._is_paused = is_paused
        self.choices = TrainerChoices()
        self._calls: list[asyncio.Future[Any]] = []
        """The parts of the collective that runs, by rank."""
        self._calling = asyncio.Lock()
        """Held by the collective that runs."""
        self._hands_over = False
        """Whether ranks hand weights over to the engines on their devices."""
        self._is_offered = self._is_first = False
        """Whether engines may have the published weights now, and whether none has got them."""
        self._wanted = asyncio.Event()
        """Engines wait for weights."""
        self.process_ids: list[int] = []
        """By rank."""
        self._addresses: list[str] = []
        """By rank."""

    @classmethod
    async def start(
        cls,
        job: RLJob,
        *,
        model: str,
        run: RunFolder,
        generation: str,
        checkpoint: Checkpoint | None,
        report: Callable[[str], None],
        reserve: Callable[[], Awaitable[object]] | None = None,
        pace: Pace | None = None,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> TrainerGroup:
        """Wait for the trainer Pods, place one rank per unit, and load the model or the checkpoint. Raise
        DamagedCheckpointError if that is not what was written.

        `run`: the run's folder, in which all checkpoints and the export are. `report` gets a text about what the group
        is waiting for; an empty string when it waits for nothing. `reserve`: awaited once all Pods have joined, before
        ranks take memory of their devices. `pace`, `is_paused`: see __init__.
        """
        trainer = job.spec.trainer
        await asyncio.to_thread(connect)
        await _wait_for_nodes(trainer.num_ranks, trainer.replicas, report)
        nodes = await asyncio.to_thread(find_trainer_nodes)
        if reserve is not None:
            await reserve()
        ranks = _place_ranks(trainer.num_ranks, num_gpus=1 if trainer.gpus_per_replica else 0)
        group = cls(job, generation, ranks, nodes, pace=pace, is_paused=is_paused)
        report("loads the model on the trainers")
        try:
            await run_with_watcher(group._load(model, run, checkpoint), group._watch_ranks(raises_deaths=False))
        except BaseException:
            group._kill()
            raise
        report("")
        return group

    async def inspect(self, rows: Sequence[TrainRow]) -> list[TokenFacts]:
        if not self._needs.reference and not self._needs.values:
            return [TokenFacts()] * len(rows)
        parts = await self._divide(rows, without_advantage=True)
        return await asyncio.to_thread(scatter_facts, rows, await self._send("inspect", parts))

    async def score(self, rows: Sequence[TrainRow]) -> list[NDArray[np.float32]]:
        parts = await self._divide(rows, without_advantage=True)
        facts = await asyncio.to_thread(scatter_facts, rows, await self._send("score", parts))
        return [each.logprobs for each in facts if each.logprobs is not None]

    async def accumulate(self, rows: Sequence[TrainRow], versions: UpdateVersions) -> None:
        started = time.monotonic()
        algorithm = self._job.spec.algorithm
        has_other_terms = algorithm.kl.coefficient > 0 or algorithm.entropy_coefficient != 0 or self._needs.values
        parts = await self._divide(rows, without_advantage=has_other_terms, versions=versions)
        if parts[0].batches:
            await self._send("accumulate", parts)
        self._update.num_tokens += sum(int(np.count_nonzero(row.loss_mask)) for row in rows)
        self._update.num_micro_batches += len(parts[0].batches)
        self._update.seconds += time.monotonic() - started

    async def apply(self, denominator: float) -> UpdateMetrics:
        started = time.monotonic()
        metrics: list[RankMetrics] = await self._broadcast("apply", denominator)
        update, self._update = self._update, UpdateCounts()
        update.seconds += time.monotonic() - started
        return summarize_update(metrics[0], update, denominator)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function of a module with each rank and the arguments. Return what it returned, by rank."""
        return await self._broadcast("call", function, *arguments)

    async def call_with_rows(
        self, function: Callable[..., Any], rows: Sequence[TrainRow], facts: Sequence[Any], *arguments: Any
    ) -> tuple[list[NDArray[np.float32]], list[Any]]:
        """Call it with the rank's rows and their `facts`, by index, before the arguments. It returns RowFacts and
        another value. Return the log-probs of all rows, and the other values by rank."""
        parts = await self._divide(rows, without_advantage=True)
        own = [(part, {i: facts[i] for i in part.indices.tolist()}) for part in parts]
        sent = await asyncio.to_thread(lambda: [ray.put(each) for each in own])
        answers = await self._call_all("call", [(function, each, *arguments) for each in sent])
        found = await asyncio.to_thread(scatter_facts, rows, [answer[0] for answer in answers])
        return [each.logprobs for each in found if each.logprobs is not None], [answer[1] for answer in answers]

    async def follow(self, spec: RLJobSpec) -> None:
        await self._broadcast("follow", spec)

    async def publish(self, version: int) -> WeightManifest:
        manifests = await self._broadcast("publish", self._generation, version)
        return WeightManifest.model_validate(manifests[0])

    async def save(self, folder: Path) -> None:
        self._is_saving = True
        await self._broadcast("save", folder)

    async def saved(self) -> dict[str, FileFacts]:
        if not self._ranks:
            raise TrainerGroupDiedError("the trainer group has ended")
        writing = self._wait_for_save()
        # A failure ends no rank: what runs meanwhile would then report lost ranks, and hide the reason.
        with self._watch.judge.running("the write of a checkpoint"):
            if errors := await wait_for(writing):
                raise await self._judge("save", errors)
        self._is_saving = False
        return {name: facts for rank in writing for name, facts in rank.result().items()}

    async def export(self, folder: Path, tokenizer_source: str, checkpoint: Checkpoint | None = None) -> float | None:
        shares: list[float | None] = await self._broadcast("export", folder, tokenizer_source, checkpoint)
        return shares[0]

    async def free(self) -> FreedMemory:
        changes: list[tuple[int, int]] = await self._broadcast("free")
        return FreedMemory(*map(sum, zip(*changes, strict=True)))

    async def restore(self) -> None:
        await self._broadcast("restore")

    async def offer_weights(self) -> None:
        if self._hands_over:
            self._is_offered = self._is_first = True
            self._wanted.set()

    async def withdraw_weights(self) -> None:
        if self._is_offered:
            self._is_offered = False
            await self._broadcast("withdraw_weights")

    async def watch(self) -> NoReturn:
        """Raise TrainerGroupDiedError once a rank died or hangs: rollouts may need the weights that it serves at any
        time. Hand over those that are offered."""
        await run_with_watcher(self._give_weights(), self._watch_ranks(raises_deaths=True))
        raise AssertionError("neither ends")

    async def _give_weights(self) -> NoReturn:
        """Hand the offered weights over, whenever an engine waits for them."""
        while True:
            await self._wanted.wait()
            if self._is_offered:
                started, is_first, self._is_first = time.monotonic(), self._is_first, False
                counts: list[int] = await self._broadcast("give_weights", is_first)
                log.info("weights handed over to %d workers in %.2f s", sum(counts), time.monotonic() - started)
            self._wanted.clear()  # beats from before do not count

    async def _watch_ranks(self, *, raises_deaths: bool) -> NoReturn:
        """`raises_deaths`: not while the ranks load, which raises why one died."""
        heartbeats = Heartbeats(self._watch)
        while True:
            self._watch.judge.tick(time.monotonic(), is_paused=self._is_paused())
            errors = await heartbeats.ask(self._ranks)
            if errors and self._ranks and raises_deaths:  # else a failed method killed them and raises the reason
                self._kill()
                raise await self._judge("watch", errors)
            if self._is_offered and self._watch.num_waiting:
                self._wanted.set()
            returned = {rank for rank, call in enumerate(self._calls) if call.done()}
            if (hung := self._watch.find_hung(returned)) is not None and self._ranks:
                await self._raise_hang(hung)
            await asyncio.sleep(_WATCH_SECONDS)

    async def _raise_hang(self, hung: HungRanks) -> NoReturn:
        """Log what shows the cause, kill all ranks, and raise."""
        await log_stacks(self._ranks, hung.ranks, hung.silent)
        why = hung.doing
        if hung.silent:
            why += f"; {await describe_silent(self._ranks, self.process_ids, self._addresses, hung.silent)}"
        error = hung_error(hung, why)
        error.lost_node = await has_lost_node(self._nodes, settle_seconds=0)
        self._kill()
        raise error

    @property
    def has_ended(self) -> bool:
        """Whether its ranks are ended, by `close` or since a call failed."""
        return self._ended.is_set()

    async def wait_until_ended(self, settle_seconds: float = SETTLE_SECONDS) -> NoReturn:
        """Raise TrainerGroupDiedError once it has ended. `settle_seconds`: see has_lost_node."""
        await self._ended.wait()
        error = TrainerGroupDiedError("a call of the ranks failed")
        error.lost_node = await has_lost_node(self._nodes, settle_seconds)
        raise error

    async def close(self) -> None:
        """End every rank, and with rank 0 the weight server. Idempotent."""
        closing = [rank.close.remote() for rank in self._ranks]
        with contextlib.suppress(TimeoutError):  # A rank that hangs is killed below.
            async with asyncio.timeout(_CLOSE_TIMEOUT_SECONDS):
                await asyncio.gather(*map(future, closing), return_exceptions=True)
        self._kill()

    async def _divide(
        self, rows: Sequence[TrainRow], *, without_advantage: bool, versions: UpdateVersions | None = None
    ) -> list[RankRows]:
        return await asyncio.to_thread(
            divide_rows,
            rows,
            num_ranks=self._job.spec.trainer.num_ranks,
            micro_batch_tokens=self.choices.micro_batch_tokens,
            layout=self._layout,
            without_advantage=without_advantage,
            versions=versions,
        )

    async def _send(self, method: str, parts: Sequence[RankRows]) -> list[Any]:
        """Call `method` with each rank's rows. They may be large: a thread copies them to Ray's object store."""
        sent = await asyncio.to_thread(lambda: [ray.put(part) for part in parts])
        return await self._call_all(method, [(part,) for part in sent])

    async def _load(self, model: str, run: RunFolder, checkpoint: Checkpoint | None) -> None:
        described = await self._broadcast("describe")
        # Adjacent ranks share a machine, so that their collectives stay on it.
        order = sorted(range(len(described)), key=lambda i: described[i][:2])
        self._ranks, described = [self._ranks[i] for i in order], [described[i] for i in order]
        machines = [machine for machine, *_ in described]
        self.process_ids = [process_id for _, _, process_id, _ in described]
        self._addresses = [address for _, address, _, _ in described]
        _, address, _, port = described[0]
        calls = [
            (rank, len(order), machines.count(machine), (address, port), self._job, model, run, checkpoint)
            for rank, machine in enumerate(machines)
        ]
        # The same on all ranks: they have the same model, and the smallest GPU decides.
        facts: list[RankFacts] = await self._call_all("start", calls)
        self._layout, self.choices, _ = facts[0]
        self._hands_over = self.choices.weight_transfer == "device"
        trainer = self._job.spec.trainer
        is_open = trainer.micro_batch_tokens is None
        log.info("trainer.microBatchTokens: %d%s", self.choices.micro_batch_tokens, " (auto)" * is_open)
        is_automatic = trainer.gradient_checkpointing == "auto"
        log.info("trainer.gradientCheckpointing: %s%s", self.choices.recomputation, " (auto)" * is_automatic)
        why = next((f", since {each.why_file}" for each in facts if each.why_file), "")
        log.info("rollout.weightTransfer: %s%s", self.choices.weight_transfer, why)

    async def _broadcast(self, method: str, *arguments: Any) -> list[Any]:
        return await self._call_all(method, [arguments] * len(self._ranks))

    async def _call_all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` on all ranks. The first failure kills the group, since the other ranks may never return. After
        one of the run's volume they do, and may try again."""
        async with self._calling:
            return await self._call_alone(method, arguments)

    async def _call_alone(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        if not self._ranks:
            raise TrainerGroupDiedError("the trainer group has ended")
        kind = arguments[0][0].__name__ if method == "call" else method
        with self._watch.calling(kind):
            calls = self._calls = [
                future(getattr(rank, method).remote(*args)) for rank, args in zip(self._ranks, arguments, strict=True)
            ]
            try:
                errors = await wait_for(calls)
                if not errors:
                    return [call.result() for call in calls]
                if method in _REPEATABLE and find_disk_error(errors[0]):
                    await asyncio.wait(calls)
                else:
                    await self._end()
                    raise await self._judge(method, errors)
            except asyncio.CancelledError:
                # Once all ranks have ended the call, they have one state, which can be saved.
                await asyncio.wait(calls, timeout=_FINISH_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
                if not all(call.done() and call.exception() is None for call in calls):
                    await self._abort(calls)
                raise
            except BaseException:
                await self._abort(calls)
                raise
            finally:
                self._calls = []
            raise await self._judge(method, errors)

    async def _abort(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Some ranks may already wait in a collective."""
        for call in calls:
            call.cancel()
        await self._end()

    def _wait_for_save(self) -> list[asyncio.Future[dict[str, FileFacts]]]:
        return [future(rank.wait_for_save.remote()) for rank in self._ranks]

    async def _end(self) -> None:
        """Kill the ranks, after they have written the last checkpoint if that is quick. A dead rank cannot: its error
        ends the wait."""
        if self._is_saving:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SAVE_TIMEOUT_SECONDS):
                    await wait_for(self._wait_for_save())
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
        self._ended.set()


def connect() -> None:
    """Join Ray as the driver through this Pod's node: a machine may run several."""
    if not ray.is_initialized():
        address = os.environ[ENV_POD_IP]
        ray.init(f"{address}:{listening_port(PORT_RAY)}", _node_ip_address=address, configure_logging=False)


def disconnect() -> None:
    """Leave Ray while its head still answers; later, shutdown would wait for the head."""
    ray.shutdown()


async def _wait_for_nodes(num_ranks: int, num_pods: int, report: Callable[[str], None]) -> None:
    """Without a limit: the Pods may be queued, which the operator reports and bounds."""
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
    actor = build_actor().options(
        num_cpus=0, num_gpus=num_gpus, resources={RAY_RESOURCE_TRAINER: 1}, max_restarts=0, max_task_retries=0
    )
    return [cast(ActorHandle, actor.remote()) for _ in range(num_ranks)]
