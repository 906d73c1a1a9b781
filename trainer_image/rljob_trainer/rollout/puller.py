"""The rollout's side of weights: follows the head's announcements, and loads the announced weights into the engine.

    watch:  long-poll of the head -> ReplicaState.announced     waits for: the head; unblocked by a new manifest
    pull:   announced -> download -> apply -> ReplicaState.serving   waits for: a manifest that is not served yet

Owns the decisions: what to fetch, when to abandon it, and whether the replica is ready. HTTP and the engine are
injected, so it runs without either. Invariant: a ready replica's engine computed the same digest of the parameters as
the publisher, for a version within max_staleness of the announced one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.errors import TransientError
from rljob_api.wire.protocol import RolloutWeights, WeightManifest

logger = logging.getLogger(__name__)

_INITIAL_BACKOFF_SECONDS = 0.25
_MAX_BACKOFF_SECONDS = 8.0


@dataclass(frozen=True)
class Download:
    """A complete file that matches the size and the sha256 of its manifest."""

    path: Path
    seconds: float


@dataclass(frozen=True)
class ApplyResult:
    """The engine's report after a load."""

    checksum: str
    pause_seconds: float
    load_seconds: float


FetchManifest = Callable[[str], Awaitable[WeightManifest | None]]
"""Requests a manifest other than the key from the head; None after a timeout. TransientError if unreachable."""
FetchFile = Callable[[WeightManifest], Awaitable[Download]]
"""Downloads and verifies. TransientError if the file is partial, wrong or missing."""
Apply = Callable[[Path, WeightManifest], Awaitable[ApplyResult]]
"""Pauses the engine, loads the file, resumes. After an exception, the engine's weights are undefined."""
Sleep = Callable[[float], Awaitable[None]]


class ReplicaState:
    """The replica's state. Only the puller changes it; the middleware reads it."""

    def __init__(self, max_staleness: int = 0) -> None:
        self.max_staleness = max_staleness
        self.is_warm = False
        self.announced: WeightManifest | None = None
        self.serving = RolloutWeights()
        self.is_broken = False
        """A load failed midway: the engine's weights belong to no version."""
        self.error = ""
        """Last error with the weights; empty after a success."""
        self._changed = asyncio.Event()

    def reason_not_ready(self) -> str:
        """Return why the replica must get no traffic; empty if it may."""
        if not self.is_warm:
            return "the engine is warming up"
        if self.announced is None:
            return "the head has announced no weights yet" + self._error_suffix()
        if not self.is_fresh(self.serving.generation, self.serving.version):
            serves = "the model it started from" if not self.serving.generation else self.serving.key
            return f"serves {serves}, but the head announces {self.announced.key}" + self._error_suffix()
        return ""

    def is_fresh(self, generation: str, version: int) -> bool:
        """Whether that version may serve now. Versions of different generations are not comparable."""
        announced = self.announced
        if announced is None or generation != announced.generation:
            return False
        return version >= announced.version - self.max_staleness

    def has_reached(self, generation: str, version: int) -> bool:
        return self.serving.generation == generation and self.serving.version >= version

    def record_change(self, **values: object) -> None:
        """Set attributes, and wake all tasks that wait for a change."""
        for name, value in values.items():
            setattr(self, name, value)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _error_suffix(self) -> str:
        return f" ({self.error})" if self.error else ""


class WeightPuller:
    """Runs until cancelled. `wait_until_warm` returns when the engine has answered its first request."""

    def __init__(
        self,
        state: ReplicaState,
        *,
        wait_until_warm: Callable[[], Awaitable[None]],
        fetch_manifest: FetchManifest,
        fetch_file: FetchFile,
        apply: Apply,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._state = state
        self._wait_until_warm = wait_until_warm
        self._fetch_manifest, self._fetch_file, self._apply = fetch_manifest, fetch_file, apply
        self._sleep = sleep

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            # Manifest and first file are fetched while the engine warms up.
            tasks.create_task(self._warm_up())
            tasks.create_task(self._watch())
            tasks.create_task(self._pull())

    async def _watch(self) -> None:
        backoff = Backoff(self._sleep)
        while True:
            announced = self._state.announced
            try:
                manifest = await self._fetch_manifest(announced.key if announced else "")
            except TransientError as error:
                # While the head restarts, keep serving what it announced last.
                logger.warning("head unreachable, retrying: %s", error)
                await backoff.wait()
                continue
            backoff.reset()
            if manifest is not None and manifest != announced:
                logger.info("head announces weights %s", manifest.key)
                self._state.record_change(announced=manifest)

    async def _pull(self) -> None:
        state, backoff = self._state, Backoff(self._sleep)
        while True:
            await state.wait_until(self._is_behind)
            manifest = state.announced
            assert manifest is not None
            try:
                await self._switch_to(manifest)
            except Exception as error:
                # The loop must survive any failure: the next attempt, or the next version, may succeed.
                logger.exception("cannot serve weights %s", manifest.key)
                state.record_change(error=f"weights {manifest.key}: {type(error).__name__}: {error}")
                await self._wait_to_retry(manifest, backoff)
            else:
                backoff.reset()

    async def _wait_to_retry(self, failed: WeightManifest, backoff: Backoff) -> None:
        """Back off, but retry at once when another version is announced."""
        waiting = asyncio.ensure_future(backoff.wait())
        await _wait_unless(waiting, self._state.wait_until(lambda: self._state.announced != failed))

    async def _warm_up(self) -> None:
        await self._wait_until_warm()
        self._state.record_change(is_warm=True)

    def _is_behind(self) -> bool:
        announced = self._state.announced
        return announced is not None and (self._state.is_broken or self._state.serving.key != announced.key)

    async def _switch_to(self, manifest: WeightManifest) -> None:
        """Download and load one version, unless a newer announcement supersedes it meanwhile."""
        state = self._state
        download = await self._fetch_unless_superseded(manifest)
        await state.wait_until(lambda: state.is_warm)
        if download is None or not state.is_fresh(manifest.generation, manifest.version):
            return
        previous = state.serving.key if state.serving.generation else "the start model"
        try:
            applied = await self._apply(download.path, manifest)
            if applied.checksum != manifest.checksum:
                raise TransientError(f"the engine's digest is {applied.checksum}, the publisher's {manifest.checksum}")
        except BaseException:
            state.record_change(is_broken=True, serving=RolloutWeights())
            raise
        state.record_change(
            is_broken=False,
            error="",
            serving=RolloutWeights(
                generation=manifest.generation,
                version=manifest.version,
                sha256=manifest.sha256,
                checksum=applied.checksum,
                pause_seconds=applied.pause_seconds,
                transfer_seconds=download.seconds,
                load_seconds=applied.load_seconds,
            ),
        )
        logger.info(
            "serving weights %s (previously %s): transfer %.3f s, pause %.3f s, including load %.3f s",
            *(manifest.key, previous, download.seconds, applied.pause_seconds, applied.load_seconds),
        )

    async def _fetch_unless_superseded(self, manifest: WeightManifest) -> Download | None:
        """Return None as soon as the version is too old to serve."""
        state = self._state
        fetching = asyncio.ensure_future(self._fetch_file(manifest))
        await _wait_unless(
            fetching, state.wait_until(lambda: not state.is_fresh(manifest.generation, manifest.version))
        )
        if fetching.cancelled():
            logger.info("weights %s were superseded during the transfer", manifest.key)
            return None
        return fetching.result()


async def _wait_unless(task: asyncio.Future[Any], condition: Coroutine[Any, Any, None]) -> None:
    """Wait until `task` ends. Cancel it if `condition` ends first, or if the caller is cancelled."""
    other = asyncio.ensure_future(condition)
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        other.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})  # a download may write its file until its task has ended


class Backoff:
    """Doubling waits between failures."""

    def __init__(self, sleep: Sleep) -> None:
        self._sleep = sleep
        self.reset()

    def reset(self) -> None:
        self._next_seconds = _INITIAL_BACKOFF_SECONDS

    async def wait(self) -> None:
        seconds, self._next_seconds = self._next_seconds, min(2 * self._next_seconds, _MAX_BACKOFF_SECONDS)
        await self._sleep(seconds)
