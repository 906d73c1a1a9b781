"""One request for a driver's status, and the bounds of its answer.

A driver is a user's program. Invariant: whatever it sends, a request ends within TIMEOUT_SECONDS, keeps at most
MAX_ANSWER_BYTES and the headers, and returns a status within the bounds of its types, or says what is wrong.
"""

import asyncio
from http import HTTPStatus
from typing import NamedTuple

import aiohttp
from pydantic import ValidationError

from rljob_api.read.documents import format_path
from rljob_api.wire.contract import UrlPath
from rljob_api.wire.driver_status import DriverStatus
from rljob_api.wire.text import clean_line

TIMEOUT_SECONDS = 2.0
"""For the whole answer, however slowly it arrives."""
MAX_ANSWER_BYTES = 64 * 1024
_MAX_HEADER_BYTES, _MAX_HEADERS = 4096, 32
_READ_BYTES = 16 * 1024
_MAX_PROBLEM_LENGTH = 200


class DriverEndpoint(NamedTuple):
    pod_uid: str
    address: str
    token: str


class UnreadableAnswerError(Exception):
    """The message says what is wrong with an answer."""


def new_session() -> aiohttp.ClientSession:
    """Return a session in which drivers share nothing: no connection, no limit of connections, no cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        read_bufsize=_READ_BYTES,
        max_line_size=_MAX_HEADER_BYTES,
        max_field_size=_MAX_HEADER_BYTES,
        max_headers=_MAX_HEADERS,
        headers={"Accept-Encoding": "identity"},
    )


async def request_status(session: aiohttp.ClientSession, driver: DriverEndpoint, port: int) -> DriverStatus:
    """Raises UnreadableAnswerError; TimeoutError if the answer is not complete in time; another OSError without an
    answer."""
    host = f"[{driver.address}]" if ":" in driver.address else driver.address
    url, headers = f"http://{host}:{port}{UrlPath.STATUS}", {"Authorization": f"Bearer {driver.token}"}
    try:
        async with (
            asyncio.timeout(TIMEOUT_SECONDS),
            session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            return parse_status(await _read_body(response))
    except OSError:
        raise
    except aiohttp.ClientConnectionError as error:
        raise ConnectionError(str(error)) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise UnreadableAnswerError("its HTTP is invalid, or its headers are too large") from error


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    if response.status != HTTPStatus.OK:
        raise UnreadableAnswerError(f"its HTTP status is {response.status}, not 200")
    if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise UnreadableAnswerError(f"its Content-Encoding is {clean_line(encoding, 20)}; it must not be compressed")
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise UnreadableAnswerError(f"it is larger than {MAX_ANSWER_BYTES // 1024} KiB")
    return bytes(body)


def parse_status(body: bytes) -> DriverStatus:
    """Raises UnreadableAnswerError. The image of a job may be newer than this operator: unknown fields are ignored."""
    try:
        return DriverStatus.model_validate_json(body, extra="ignore")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = format_path(first["loc"])
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        raise UnreadableAnswerError(clean_line(problem, _MAX_PROBLEM_LENGTH)) from None
