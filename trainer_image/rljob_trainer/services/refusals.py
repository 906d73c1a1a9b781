"""Whether an external endpoint that fails a request fails this sample alone, or every request.

Sends the request again that succeeded last: the answer decides. So a sample whose content a firewall rejects, or that
takes too long, costs its own result, and an expired key, a hanging proxy or a database that is away costs none. Leaves
results and waits to `requests`. Invariant: a failure before the first success is never judged here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import aiohttp

REFUSED_STATUSES: Final = (401, 403, 404, 405)
"""Before the first success: the URL, the method or the key is wrong."""
_ANSWERING_STATUSES: Final = (200, 429)
_MAX_URL_LENGTH: Final = 200


def is_redirect(status: int) -> bool:
    return 300 <= status < 400


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
