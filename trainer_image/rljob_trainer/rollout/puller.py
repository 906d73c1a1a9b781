"""The rollout's side of weights: follows the head's announcements, and loads the announced weights into the engine.

    watch:  long-poll of the head -> ReplicaState.announced
    pull:   announced -> download -> load -> ReplicaState.serving

Invariant: a ready replica's engine computed the same digest as the publisher, for the announced version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rljob_api.errors import TransientError
from rljob_api.wire.weights import MAX_PULL_ERROR_LENGTH, OWN_WEIGHTS, PullReport, RolloutWeights, WeightManifest
from rljob_trainer.concurrency import wait_forever
from rljob_trainer.outages import double

if TYPE_CHECKING:
    from rljob_trainer.rollout.weight_transfer import EngineLoader, WeightClient

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_PAUSES = 0.25, 8.0
"""Seconds between attempts: the first, and at most."""


class ReplicaState:
    """The replica's state. Only the puller and the naps change it; the middleware reads it."""

    def __init__(self) -> None:
        self.is_warm = False
        self.is_asleep = False
        """The engine sleeps, or will once a running load has ended: it serves nothing, and loads nothing."""
        self.wanted: tuple[str, int] | None = None
        """Generation and version with which the engine was woken: no lower version of this generation is loaded."""
        self.announced: WeightManifest | None = None
        self.serving = RolloutWeights()
        self.is_broken = False
        """A load failed midway: the engine's weights belong to no version."""
        self.error = ""
        """Last error with the weights; empty after a success."""
        self.head_error = ""
        """Why the last poll of the head failed; empty after a success."""
        self.progress = 0
        """See `PullReport.progress`."""
        self.is_draining = False
        """Whether a load waits for requests in flight."""
        self._changed = asyncio.Event()

    def reason_not_ready(self) -> str:
        """Return why the replica must get no traffic; empty if it may."""
        if not self.is_warm:
            return "the engine is warming up"
        if self.is_asleep:
            return "the engine is asleep: it is the trainer's turn"
        error = f" ({self.error})" if self.error else ""
        if self.announced is None:
            return "the head has announced no weights yet" + error
        if self.serving.key != self.announced.key:
            serves = f"serves {self.serving.key}" if self.serving.generation else "has loaded no weights yet"
            return f"{serves}, but the head announces {self.announced.key}{error}"
        return ""

    def must_load(self) -> bool:
        """Whether the replica is awake and does not serve the announced weights, and these are not too old."""
        if self.is_asleep or self.announced is None or self.serving.key == self.announced.key:
            return False
        generation, version = self.wanted or ("", 0)
        return self.announced.generation != generation or self.announced.version >= version

    def report(self, replica: str) -> PullReport | None:
        """Return what this replica does about the announced weights; None if it has nothing to load."""
        if self.announced is None or not self.must_load():
            return None
        error = (self.error or self.head_error)[:MAX_PULL_ERROR_LENGTH]
        return PullReport(
            replica=replica,
            key=self.announced.key,
            progress=self.progress,
            is_draining=self.is_draining,
            error=error,
        )

    def record_change(self, **values: object) -> None:
        """Set attributes, and wake all tasks that wait for a change."""
        for name, value in values.items():
            setattr(self, name, value)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


@dataclass
class WeightPuller:
    """Runs until cancelled, or until the engine cannot warm up."""

    state: ReplicaState
    client: WeightClient
    engine: EngineLoader
    address: str
    sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            # Manifest and first file are fetched while the engine warms up.
            tasks.create_task(self._warm_up())
            tasks.create_task(self._watch())
            tasks.create_task(self._pull())

    async def _warm_up(self) -> None:
        await self.engine.warm_up()
        self.state.record_change(is_warm=True)

    async def _watch(self) -> None:
        backoff = double(*_PAUSES)
        while True:
            announced = self.state.announced
            try:
                report = self.state.report(self.address)
                manifest = await self.client.fetch_manifest(announced.key if announced else "", report)
            except TransientError as error:
                # While the head restarts, keep serving what it announced last.
                if not self.state.head_error:  # once in an outage: each job ends with one
                    logger.warning("head unreachable, retrying: %s", error)
                self.state.head_error = f"the head is unreachable: {error}"
                await self.sleep(next(backoff))
                continue
            backoff = double(*_PAUSES)
            self.state.head_error = ""
            if manifest is not None and manifest != announced:
                logger.info("head announces weights %s", manifest.key)
                self.state.record_change(announced=manifest, progress=0)

    async def _pull(self) -> None:
        state, backoff = self.state, double(*_PAUSES)
        while True:
            await state.wait_until(state.must_load)
            manifest = state.announced
            assert manifest is not None
            try:
                await self._switch_to(manifest)
            except Exception as error:
                # The loop must survive any failure: the next attempt, or the next version, may succeed.
                logger.exception("cannot serve weights %s", manifest.key)
                state.record_change(error=f"weights {manifest.key}: {type(error).__name__}: {error}")
                await self._unless_superseded(manifest, self.sleep(next(backoff)))
            else:
                backoff = double(*_PAUSES)

    def _is_current(self, manifest: WeightManifest) -> bool:
        """Whether to go on with `manifest`: nothing else was announced meanwhile, and the engine was not put to
        sleep."""
        return self.state.announced == manifest and not self.state.is_asleep

    async def _switch_to(self, manifest: WeightManifest) -> None:
        """Fetch and load one version, unless it is superseded meanwhile (see _is_current)."""
        try:
            await self._fetch_and_load(manifest)
        finally:
            self.client.release()

    async def _fetch_and_load(self, manifest: WeightManifest) -> None:
        state, started_at = self.state, time.perf_counter()
        path = None
        if manifest.url:  # else the ranks hand the weights over during the load
            fetching = self.client.fetch_file(manifest, self._record_received)
            path = await self._unless_superseded(manifest, fetching)
        transfer_seconds = time.perf_counter() - started_at
        await state.wait_until(lambda: state.is_warm)
        async with self.engine.exclusive:
            if (manifest.url and path is None) or not self._is_current(manifest):
                logger.info("weights %s were superseded during the transfer", manifest.key)
                return
            try:
                served = await self.engine.load(path, manifest, self._record_draining)
            except BaseException:
                state.record_change(is_broken=True, serving=RolloutWeights())
                raise
            finally:
                state.is_draining = False
        if state.is_asleep:
            return
        served.transfer_seconds = transfer_seconds
        served.transfer_bytes = self.client.transfer_bytes if path is not None else 0
        state.record_change(is_broken=False, error="", serving=served)
        logger.info(
            "serving weights %s: transfer %.3f s (%d bytes), pause %.3f s, including load %.3f s",
            *(manifest.key, transfer_seconds, served.transfer_bytes, served.pause_seconds, served.load_seconds),
        )

    def _record_received(self, num_bytes: int) -> None:
        self.state.progress = num_bytes

    def _record_draining(self, is_draining: bool) -> None:
        self.state.is_draining = is_draining
        if not is_draining:
            self.state.progress += 1

    async def _unless_superseded(self, manifest: WeightManifest, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Return the result of `work`; cancel it and return None once it is no longer for the current version."""
        task = asyncio.ensure_future(work)
        superseded = asyncio.ensure_future(self.state.wait_until(lambda: not self._is_current(manifest)))
        try:
            await asyncio.wait({task, superseded}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            superseded.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})  # a download may write its file until its task has ended


async def serve_own_weights(engine: EngineLoader, state: ReplicaState) -> NoReturn:
    """In place of the puller, where nothing trains: be ready once the engine is warm, with what it has loaded."""
    await engine.warm_up()
    state.record_change(is_warm=True, announced=OWN_WEIGHTS, serving=await engine.adopt(OWN_WEIGHTS))
    await wait_forever()  # as a puller, it ends with its server
