"""Puts the rollouts in the trainer's Pods to sleep and wakes them, through the supervisor of each Pod.

Invariant: a change of turns has ended once the supervisors of all Pods, as discovery lists them then, have confirmed
it. One that does not answer is asked again: its Pod may be starting, or leaving.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping

import aiohttp

from rljob_api.errors import TransientError
from rljob_api.wire import contract
from rljob_api.wire.discovery import listening_port, resolve
from rljob_api.wire.weights import EnginesReport, Turn, WeightManifest
from rljob_trainer.replicas.http import CONNECT_SECONDS, send

log = logging.getLogger(__name__)

_MARGIN_SECONDS = 180
"""For a supervisor, which gives a replica as long to start, to replace one that does not change its turn."""
_RETRY_SECONDS = 0.5
_MAX_REASON_LENGTH = 300


class TrainerEngines:
    """The rollouts of all trainer Pods, as driver.ports.Engines."""

    def __init__(
        self,
        num_pods: int,
        startup_seconds: float,
        session: aiohttp.ClientSession,
        *,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`startup_seconds`: limit for the start of a replica. `report` gets a text about what a change of turns waits
        for, and an empty string once it has ended."""
        self._service, self._num_pods = os.environ[contract.ENV_ROLLOUT_SERVICE], num_pods
        self._session, self._report = session, report
        # One that has died is started again, which takes as long as the first time.
        self._timeout_seconds = startup_seconds + _MARGIN_SECONDS

    async def sleep(self) -> EnginesReport:
        """Free the memory of their devices. Requests in flight are aborted."""
        return await self._change("trainer", {})

    async def wake(self, manifest: WeightManifest) -> EnginesReport:
        """Let those that sleep get their memory back and load `manifest`, which must be announced, and let those that
        have died start. RolloutClient.sync waits for the load."""
        return await self._change("rollouts", {"want": manifest.key})

    async def _change(self, turn: Turn, query: Mapping[str, str]) -> EnginesReport:
        """Ask all Pods at once, until each has confirmed. Raise TransientError if one has not in time."""
        deadline = time.monotonic() + self._timeout_seconds
        confirmed: dict[str, EnginesReport] = {}
        while True:
            addresses = await asyncio.to_thread(resolve, self._service)
            pending = [address for address in addresses if address not in confirmed]
            answers = await asyncio.gather(*(self._ask(each, {"turn": turn, **query}, deadline) for each in pending))
            confirmed |= {a: each for a, each in zip(pending, answers, strict=True) if isinstance(each, EnginesReport)}
            refused = {a: each for a, each in zip(pending, answers, strict=True) if isinstance(each, str)}
            if not refused and len(addresses) >= self._num_pods:
                self._report("")
                return add_reports([confirmed[address] for address in addresses])
            reason = describe_missing(turn, len(addresses), self._num_pods, refused)
            if time.monotonic() > deadline:
                raise TransientError(f"after {self._timeout_seconds} s, {reason}; see the logs of the trainer's Pods")
            self._report(reason)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _ask(self, address: str, query: Mapping[str, str], deadline: float) -> EnginesReport | str:
        """Return the report of a Pod's supervisor, or why there is none."""
        url = f"http://{address}:{listening_port(contract.PORT_ENGINES)}{contract.UrlPath.ENGINES}"
        seconds = max(CONNECT_SECONDS, deadline - time.monotonic())
        try:
            async with send(self._session, "POST", url, seconds, params=query) as response:
                if response.status != 200:
                    return f"{response.status} {(await response.text())[:_MAX_REASON_LENGTH]}"
                return EnginesReport.model_validate(await response.json())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"[:_MAX_REASON_LENGTH]


def add_reports(reports: Collection[EnginesReport]) -> EnginesReport:
    """Return the report of all Pods: they change at the same time."""
    of_models = [report.model_bytes for report in reports]
    return EnginesReport(
        num_running=sum(report.num_running for report in reports),
        num_restarts=sum(report.num_restarts for report in reports),
        num_bytes=sum(report.num_bytes for report in reports),
        model_bytes=None if None in of_models else sum(filter(None, of_models)),
        seconds=max((report.seconds for report in reports), default=0.0),
    )


def describe_missing(turn: Turn, num_found: int, num_pods: int, refused: Mapping[str, str]) -> str:
    """Return what a change of turns waits for: Pods, and those of them that have not confirmed."""
    what = "sleep" if turn == "trainer" else "serve"
    parts = [f"{address}: {reason}" for address, reason in sorted(refused.items())]
    if num_found < num_pods:
        parts.append(f"the service lists {num_found} of {num_pods} Pods")
    return f"rollouts in trainer Pods do not {what} yet: {'; '.join(parts)}"
