"""The rollout's side of weights: follows what the head announces, and brings the engine to it.

    watch:  long-poll of the head -> ReplicaState.announced     waits for: the head; unblocked by a new manifest
    pull:   announced -> download -> apply -> ReplicaState.serving   waits for: a manifest that is not served yet

Owns the decisions (what to fetch, when to give up on it, whether the replica is ready); HTTP and the engine are
injected, so that it runs without either. Invariant: ready means that the engine's own digest of the parameters equals
the publisher's, for a version within max_staleness of the announced one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rljob_api.errors import TransientError
from rljob_api.wire.protocol import RolloutWeights, WeightManifest

logger = logging.getLogger(__name__)

_INITIAL_BACKOFF_SECONDS = 0.25
_MAX_BACKOFF_SECONDS = 8.0


@dataclass(frozen=True)
class Download:
    """A complete file whose size and sha256 are those of its manifest."""

    path: Path
    seconds: float


@dataclass(frozen=True)
class ApplyResult:
    """What the engine says after a load."""

    checksum: str
    pause_seconds: float
    load_seconds: float


FetchManifest = Callable[[str], Awaitable[WeightManifest | None]]
"""Asks the head for a manifest other than the key; None when none came in time. TransientError when unreachable."""
FetchFile = Callable[[WeightManifest], Awaitable[Download]]
"""Downloads and verifies. TransientError when the file is partial, wrong or gone."""
Apply = Callable[[Path, WeightManifest], Awaitable[ApplyResult]]
"""Pauses the engine, loads the file, resumes. Whatever it raises leaves the engine's weights unknown."""
Sleep = Callable[[float], Awaitable[None]]


class ReplicaState:
    """What this replica knows and serves. Changed by the puller alone; read by the middleware."""

    def __init__(self, max_staleness: int = 0) -> None:
        self.max_staleness = max_staleness
        self.is_warm = False
        self.announced: WeightManifest | None = None
        self.serving = RolloutWeights()
        self.is_broken = False
        """A load failed half-way: what the engine would generate is neither version's."""
        self.error = ""
        """What last went wrong with the weights; empty since the last success."""
        self._changed = asyncio.Event()

    def reason_not_ready(self) -> str:
        """Why no traffic may come; empty when it may."""
        if not self.is_warm:
            return "the engine is warming up"
        if self.announced is None:
            return "the head has announced no weights yet" + self._error_suffix()
        if not self.is_fresh(self.serving.generation, self.serving.version):
            serves = "the model it started from" if not self.serving.generation else self.serving.key
            return f"serves {serves}, the head announces {self.announced.key}" + self._error_suffix()
        return ""

    def is_fresh(self, generation: str, version: int) -> bool:
        """Whether that version may serve now. Numbers of different generations do not compare."""
        announced = self.announced
        if announced is None or generation != announced.generation:
            return False
        return version >= announced.version - self.max_staleness

    def has_reached(self, generation: str, version: int) -> bool:
        return self.serving.generation == generation and self.serving.version >= version

    def record_change(self, **values: object) -> None:
        """Set attributes and wake whoever waits for a change."""
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
    """Runs until cancelled. `wait_until_warm` ends when the engine has answered its first request."""

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
            # The head is asked, and the first file fetched, while the engine warms up.
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
                # A head that restarts is no reason to stop serving what it last announced.
                logger.warning("head unreachable, trying again: %s", error)
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
                # Any failure of one version must not end the loop: the next try, or version, may do.
                logger.exception("cannot serve weights %s", manifest.key)
                state.record_change(error=f"weights {manifest.key}: {type(error).__name__}: {error}")
                await self._wait_to_retry(manifest, backoff)
            else:
                backoff.reset()

    async def _wait_to_retry(self, failed: WeightManifest, backoff: Backoff) -> None:
        """Another version is worth a try at once."""
        waits = [backoff.wait(), self._state.wait_until(lambda: self._state.announced != failed)]
        futures = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in futures:
                future.cancel()

    async def _warm_up(self) -> None:
        await self._wait_until_warm()
        self._state.record_change(is_warm=True)

    def _is_behind(self) -> bool:
        announced = self._state.announced
        return announced is not None and (self._state.is_broken or self._state.serving.key != announced.key)

    async def _switch_to(self, manifest: WeightManifest) -> None:
        """Download and load one version, unless a newer announcement makes it useless on the way."""
        state = self._state
        download = await self._fetch_unless_superseded(manifest)
        await state.wait_until(lambda: state.is_warm)
        if download is None or not state.is_fresh(manifest.generation, manifest.version):
            return
        previous = state.serving.key if state.serving.generation else "the start model"
        try:
            applied = await self._apply(download.path, manifest)
            if applied.checksum != manifest.checksum:
                raise TransientError(f"the engine holds {applied.checksum}, published was {manifest.checksum}")
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
            "serving weights %s (before: %s): transfer %.3f s, pause %.3f s, of it load %.3f s",
            *(manifest.key, previous, download.seconds, applied.pause_seconds, applied.load_seconds),
        )

    async def _fetch_unless_superseded(self, manifest: WeightManifest) -> Download | None:
        """None as soon as the version would be too old to serve: the newest is fetched instead."""
        state = self._state
        fetching = asyncio.ensure_future(self._fetch_file(manifest))
        superseded = asyncio.ensure_future(
            state.wait_until(lambda: not state.is_fresh(manifest.generation, manifest.version))
        )
        try:
            await asyncio.wait({fetching, superseded}, return_when=asyncio.FIRST_COMPLETED)
            if not fetching.done():
                logger.info("weights %s were superseded during their transfer", manifest.key)
                return None
            return fetching.result()
        finally:
            superseded.cancel()
            if not fetching.done():
                fetching.cancel()
                # The file is being written until the task has really ended.
                await asyncio.wait({fetching})


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
