"""What every request to a service has, and every result: of a reward, a function or an episode. Pure."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import aiohttp

from rljob_api.wire.base import InvalidReason, Lane
from rljob_api.wire.calls import CallResult
from rljob_api.wire.contract import PORT_SERVICE, UrlPath
from rljob_api.wire.ports import listening_port
from rljob_api.wire.retry_after import parse_retry_after
from rljob_api.wire.scores import Part, ScoreResult
from rljob_trainer.replicas.http import send

_FINAL_REASONS = (InvalidReason.ABSTAINED, InvalidReason.BAD_REQUEST)
_DEFAULT_RETRY_AFTER_SECONDS = 1.0
_MIN_RETRY_AFTER_SECONDS = 0.05
_INFO_TIMEOUT_SECONDS = 10.0


Outcome = ScoreResult | CallResult
"""One result of a server: of a sample, or of a call."""
R = TypeVar("R", bound=Outcome)


class Call(Protocol[R]):
    """One request. Retries and hedges send the same one."""

    @property
    def lane(self) -> Lane: ...
    @property
    def num_results(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def max_response_bytes(self) -> int: ...
    @property
    def is_short(self) -> bool:
        """Whether it is short, so neither hedged nor measured."""
        ...

    def encode(self, reads: Collection[Part] = ()) -> bytes:
        """Return the body. `reads`: the parts that the server reads."""
        ...

    def end(self) -> None:
        """Its last request has ended, with a response or without."""
        ...

    def read(self, text: str, seconds: float) -> list[R]: ...
    def fail(self, reason: InvalidReason, message: str, seconds: float = 0.0) -> list[R]: ...


@dataclass(eq=False)
class PendingRequest(Generic[R]):
    call: Call[R]
    started_at: float
    waits_since: float
    """When it last started to wait for a replica."""
    waits_for: str = "a replica"
    sent_at: float | None = None
    """When the current replica received it; None while it waits for one."""
    tried: set[str] = field(default_factory=set)
    """Replicas that have had it; another attempt avoids them."""
    num_requests: int = 0
    num_failures: int = 0
    """Requests without a response: rejected, broken off, or timed out."""
    was_failed: bool = False
    """By an endpoint that answered another request afterwards."""
    num_executions: int = 0
    execute_seconds: float = 0.0
    seconds: float = 0.0
    """From its start to its end, waits and retries included."""


def is_final(results: Sequence[Outcome]) -> bool:
    """Return whether a retry is useless. The same function on the same text abstains again."""
    return all(result.valid or result.reason in _FINAL_REASONS for result in results)


def num_valid(results: Sequence[Outcome]) -> int:
    return sum(result.valid for result in results)


def busy_seconds(retry_after: str | None) -> float:
    """Return for how long to avoid a replica that answered 429 with this Retry-After."""
    seconds = parse_retry_after(retry_after)
    seconds = _DEFAULT_RETRY_AFTER_SECONDS if seconds is None else seconds
    return max(seconds, _MIN_RETRY_AFTER_SECONDS)


async def read_text(response: aiohttp.ClientResponse, max_bytes: int) -> str:
    """Return the body, up to what exceeds `max_bytes`. The rest is not received."""
    body = bytearray()
    while len(body) <= max_bytes and (chunk := await response.content.readany()):
        body += chunk
    return body.decode(errors="replace")  # the parser reports what is not text


async def first_final(tasks: Sequence[asyncio.Task[list[R] | None]]) -> list[R] | None:
    """Return the first final results; if there are none, the results with the most valid samples."""
    best: list[R] | None = None
    for next_done in asyncio.as_completed(tasks):
        results = await next_done
        if results is None:
            continue
        if is_final(results):
            return results
        if best is None or num_valid(results) > num_valid(best):
            best = results
    return best


def ask_info(
    session: aiohttp.ClientSession, address: str, headers: Mapping[str, str]
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Ask a replica what it serves."""
    url = f"http://{address}:{listening_port(PORT_SERVICE)}{UrlPath.INFO}"
    return send(session, "GET", url, _INFO_TIMEOUT_SECONDS, headers)
