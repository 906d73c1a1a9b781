"""Publishes weights to the rollouts, and owns their update, which may outlast a step.

    trainer.publish --> rollouts.require --> board.announce --> rollouts pull --> rollouts.sync
                                                            '-> their turn, on shared devices

Invariant: at most one update of the rollouts is under way, and each wait for it raises its error.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rljob_api.wire.weights import WeightManifest
from rljob_trainer.concurrency import end_tasks
from rljob_trainer.driver.evaluation import EvalLane
from rljob_trainer.driver.ledger import Ledger
from rljob_trainer.driver.ports import Trainer, Turns
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.replicas.rollout_client import RolloutClient


@dataclass
class Publisher:
    """Use it as a context: leaving it ends an update of the rollouts.

    `has_rollouts`: if not, nothing is published. `spans_updates`: whether requests may run while weights change.
    """

    trainer: Trainer
    turns: Turns
    rollouts: RolloutClient
    board: StatusBoard
    ledger: Ledger
    held_out: EvalLane
    has_rollouts: bool
    spans_updates: bool
    _syncing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Publisher:
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._syncing)

    async def publish(self, version: int) -> None:
        """Publish `version`, and wait until at least one rollout serves it, and soon all healthy ones. If requests may
        run while weights change, the next step begins meanwhile."""
        if not self.has_rollouts:
            return
        await self.wait()
        # All completions of an evaluation must come from the same weights.
        with self.ledger.clock.phase("evaluate"):
            await self.held_out.wait_until_generated()
        with self.ledger.clock.publishing():
            manifest = await self.trainer.publish(version)
        self.ledger.record_published(manifest)
        # Before any group of the next step starts: its tokens must not be older than its ticket.
        self.rollouts.require(manifest)
        await self.board.announce(manifest)
        await self.turns.give_to_rollouts(manifest)
        self._syncing = asyncio.create_task(self._sync(manifest))
        if version == 0 or not self.spans_updates:
            with self.ledger.clock.phase("sync"):
                await self.wait()

    async def wait(self) -> None:
        """Wait for the update of the rollouts that is under way. Raise why it failed."""
        if self._syncing is not None:
            await asyncio.shield(self._syncing)  # a cancelled wait leaves it as it is

    async def _sync(self, manifest: WeightManifest) -> None:
        self.ledger.record_weights(manifest, await self.rollouts.sync(manifest))
