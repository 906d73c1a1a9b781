"""What every request to a service has, and every result: of a reward, a function or an episode. And whether an external
endpoint that fails a request fails this sample alone, or every request.

For that, Refusals sends the request again that succeeded last: the answer decides. So a sample whose content a firewall
rejects, or that takes too long, costs its own result, and an expired key, a hanging proxy or a database that is away
costs none. Leaves results and waits to the client. Invariant: a failure before the first success is never judged here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

import aiohttp

from rljob_api.wire.base import InvalidReason, Lane
from rljob_api.wire.calls import CallResult
from rljob_api.wire.contract import PORT_SERVICE, UrlPath
from rljob_api.wire.discovery import listening_port
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


REFUSED_STATUSES: Final = (401, 403, 404, 405)
"""Before the first success: the URL, the method or the key is wrong."""
_ANSWERING_STATUSES: Final = (200, 429)
_MAX_URL_LENGTH: Final = 200


def describe_redirect(address: str, status: int, headers: Mapping[str, str]) -> str:
    """No request follows a redirect: it would let the server choose what the head requests, and who gets the data."""
    target = headers.get("Location", "")[:_MAX_URL_LENGTH]
    return (
        f"{address} returned {status}, and redirects are not followed; set url to its target {target!r} if you trust it"
    )


class Refusals:
    def __init__(self, post: Callable[[bytes], Awaitable[int]]) -> None:
        """`post`: sends a body to the endpoint and returns the status of the response."""
        self._post = post
        self._answered: bytes | None = None
        """The body of the request that succeeded last."""
        self._probe: asyncio.Task[bool] | None = None

    @property
    def has_answered(self) -> bool:
        return self._answered is not None

    def record_answer(self, body: bytes) -> None:
        self._answered = body

    async def is_answering(self) -> bool:
        """Return whether the endpoint answers other requests now. Failures at the same time share a probe."""
        assert self._answered is not None
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._ask(self._answered))
        return await asyncio.shield(self._probe)  # another caller that is cancelled must not end it

    async def _ask(self, body: bytes) -> bool:
        try:
            return await self._post(body) in _ANSWERING_STATUSES
        except (aiohttp.ClientError, OSError):  # a TimeoutError is an OSError
            return False
