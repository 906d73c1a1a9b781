"""The rows of a job's environment or program, asked for page by page. Used once, before the driver starts."""

from typing import ClassVar, Final

import aiohttp
from pydantic import ValidationError

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job_spec import Service
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import CallRequest, CallResult, RowsCall, RowsReply
from rljob_api.wire.contract import MAX_ROWS_OF_PAGE, READ_ROWS
from rljob_api.wire.driver_status import RewardDemand
from rljob_trainer.calls.client import FunctionCall
from rljob_trainer.outages.registry import Outages
from rljob_trainer.services.client import ServiceClient

_NO_ANSWER: Final = (InvalidReason.UNREACHABLE, InvalidReason.DEADLINE)
"""Reasons for which the environment is not the cause."""


class RowsClient(ServiceClient[CallResult]):
    """Client of the runner for rows alone."""

    SPREADS: ClassVar = False
    """A replica that did not make the earlier rows of a generator has to make them before those of a page."""

    def __init__(self, service: Service, session: aiohttp.ClientSession, outages: Outages | None = None) -> None:
        super().__init__(service.settings, service.path, session, name="runner", source=service.source, outages=outages)
        self.environment = describe_environment(service)

    async def close(self) -> None:
        await super().close()
        self.health.clear()  # nothing asks it again

    async def read(self, split: str, start: int, count: int = MAX_ROWS_OF_PAGE) -> RowsReply:
        """Return a page of rows. Raise UserError if the environment has none to give, and TransientError if it does not
        answer. The caller adds the field of the job."""
        call = RowsCall(split=split, start=start, count=min(count, MAX_ROWS_OF_PAGE))
        request = CallRequest(id=f"rows/{split}/{start}", function=READ_ROWS, arguments=call.model_dump())
        [result], _ = await self.call(FunctionCall(request))
        if result.valid:
            return self._parse(result)
        problem = f"{self.environment} gave no rows: {result.message}"
        if result.reason is InvalidReason.BAD_REQUEST:  # its message says what to do
            raise UserError(problem)
        if result.reason in _NO_ANSWER:
            raise TransientError(problem)
        raise UserError(f"{problem} ({result.reason}); correct what returns them, or the split")

    def _parse(self, result: CallResult) -> RowsReply:
        try:
            return RowsReply.model_validate(result.value, extra="ignore")
        except ValidationError as error:
            raise UserError(f"{self.environment} gave no rows, but {str(result.value)[:200]}: {error}") from error

    def demand(self) -> RewardDemand:
        """Return what an autoscaler needs to know while rows are read: one slot."""
        return RewardDemand(samples=1, expected=1, holds_slots=True, is_open=True, is_first=True)

    def describe_wait(self) -> str:
        """Return what is missing; empty if a page is on its way."""
        return "" if self.replicas.fleet.replicas else self._describe_missing()


def describe_environment(service: Service) -> str:
    """Return `the environment my-env of verifiers`, or `the program of agent.runner.function`."""
    function = service.settings.function
    given = (function.factory_args or {}).get("id") if function else None
    if service.framework:
        return f"the environment {given} of {service.framework}" if given else f"the environment of {service.framework}"
    return "the program of agent.runner.function"
