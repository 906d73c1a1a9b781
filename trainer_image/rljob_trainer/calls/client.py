"""The clients of what an agent calls: the simulated user or the functions of a tool, and the runner of episodes.

Each time that an episode is sent is another attempt with another key. Closing its request ends the episode's process.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import ClassVar, Final

import aiohttp

from rljob_api.manifest.job_spec import Service
from rljob_api.wire.calls import CallRequest, CallResult
from rljob_trainer.agents.base import EpisodeMessage
from rljob_trainer.calls.messages import EpisodeRequest, FunctionCall
from rljob_trainer.outages.registry import Dependency, Outages
from rljob_trainer.outages.waiting import PAUSES, double
from rljob_trainer.services.client import ServiceClient

log = logging.getLogger(__name__)

_EPISODES_PER_SLOT: Final = 1
"""An episode lasts much longer than the way of a request: one that waits does so in the driver, for whichever replica
is free first."""


class CallClient(ServiceClient[CallResult]):
    """Client of the simulated user or a tool."""

    def __init__(self, service: Service, session: aiohttp.ClientSession, outages: Outages | None = None) -> None:
        name = "simulated user" if service.kind == "user" else f"tool {service.settings.name}"
        super().__init__(service.settings, service.path, session, name=name, source=service.source, outages=outages)
        self.service = service

    async def call(self, request: CallRequest) -> tuple[CallResult, float]:
        """Return the result and the seconds until it. Raise UserError and TransientError."""
        [result], pending = await self._run(FunctionCall(request))
        return result, pending.seconds

    def _count_readers(self) -> int:
        """Return how many wait for the functions of the tool."""
        return max(0, self.replicas.num_waiting - self.requests.num_waiting())

    def describe_wait(self) -> str:
        """Return `3 replies of the user, oldest 4.1 s`, and what is missing; empty if nothing is in flight."""
        count = len(self.requests.in_flight)
        if not count and not self.replicas.num_waiting:
            return ""
        if not count:  # its functions must be known before the first prompt
            return f"the functions of the {self.replicas.name}{self._describe_missing()}"
        if self.service.kind == "user":
            return f"{count} {'replies' if count > 1 else 'reply'} of the user{self._describe_oldest()}"
        what = f"{count} {'results' if count > 1 else 'result'}"
        return f"{what} of the tool {self.service.settings.name}{self._describe_oldest()}"


class RunnerClient(ServiceClient[CallResult]):
    HOLDS_SLOTS: ClassVar[bool] = True

    def __init__(
        self,
        service: Service,
        session: aiohttp.ClientSession,
        outages: Outages | None = None,
        calls: Sequence[Dependency] = (),
    ) -> None:
        """`calls`: what episodes call, such as the rollouts. An episode that fails while one of them is away does not
        count."""
        self._calls = calls
        super().__init__(
            service.settings,
            service.path,
            session,
            name="runner",
            source=service.source,
            outages=outages,
            in_flight_per_slot=_EPISODES_PER_SLOT,
        )

    async def run(self, message: EpisodeMessage) -> tuple[CallResult, float]:
        """Return the result and the seconds until it. Raise UserError and TransientError."""
        started_at, delays = time.monotonic(), double(*PAUSES)
        while True:
            sent_at = self.replicas.now()
            [result], _ = await self._run(EpisodeRequest(message))
            if result.valid or not any(each.was_away(sent_at) for each in self._calls):
                return result, time.monotonic() - started_at
            for each in self._calls:
                each.check()
            log.warning("episode %s is run again, since what it calls was away: %s", message.id, result.message)
            await asyncio.sleep(next(delays))

    def describe_wait(self) -> str:
        """Return `3 episodes in the runner, oldest 41 s, 2 wait for a free slot`; empty if nothing is in flight."""
        count, num_waiting = len(self.requests.in_flight), self.requests.num_waiting()
        if not count:
            return ""
        what = f"{count} {'episodes' if count > 1 else 'episode'} in the runner"
        waiting = f", {num_waiting} of them for a free slot" if num_waiting else ""
        return f"{what}{self._describe_oldest(waiting)}"
