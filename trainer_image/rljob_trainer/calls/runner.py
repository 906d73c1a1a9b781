"""The client of the runner: the Pods that run the episodes of an environment or a program.

Each time that an episode is sent is another attempt with another key. Closing the request ends the episode's process.
"""

from __future__ import annotations

from typing import ClassVar, Final

import aiohttp

from rljob_api.manifest.job import Service
from rljob_api.wire.protocol import CallResult
from rljob_trainer.agents.base import EpisodeMessage
from rljob_trainer.calls.client import ServiceClient
from rljob_trainer.calls.messages import EpisodeRequest

_IN_FLIGHT_PER_SLOT: Final = 1
"""An episode lasts much longer than the way of a request: one that waits does so in the driver, for whichever replica
is free first."""


class RunnerClient(ServiceClient):
    HOLDS_SLOTS: ClassVar[bool] = True

    def __init__(self, service: Service, session: aiohttp.ClientSession) -> None:
        super().__init__(service, session, "runner", in_flight_per_slot=_IN_FLIGHT_PER_SLOT)

    async def run(self, message: EpisodeMessage) -> tuple[CallResult, float]:
        """Return the result and the seconds until it. Raise UserError and TransientError."""
        return await self._run(EpisodeRequest(message))

    def describe_wait(self) -> str:
        """Return `3 episodes in the runner, oldest 41 s, 2 wait for a free slot`; empty if nothing is in flight."""
        count, num_waiting = len(self._requests.in_flight), self._requests.num_waiting()
        if not count:
            return ""
        what = f"{count} {'episodes' if count > 1 else 'episode'} in the runner"
        waiting = f", {num_waiting} of them for a free slot" if num_waiting else ""
        return f"{what}, oldest {self._requests.oldest_seconds():.1f} s{waiting}{self._describe_missing()}"
