"""One request for a driver's status: whatever a program answers, it is bounded, and says what is wrong."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.wire.driver_status import DriverStatus
from rljob_operator.kube import driver_request
from rljob_operator.kube.driver_request import (
    MAX_ANSWER_BYTES,
    DriverEndpoint,
    UnreadableAnswerError,
    new_session,
    parse_status,
    request_status,
)
from tests.support.hostile_drivers import OK, PROBLEMS, hang, serve, trickle
from tests.support.loopback import next_address

_SOCKET_BUFFERS = 16 * 1024 * 1024
"""More than what the kernel takes for a program that does not read."""


async def ask(behaviour):
    """Return what the request returned or raised, and the bytes that the program could send."""
    driver = DriverEndpoint("uid", next_address(), "secret")
    async with serve(behaviour, driver.address, 8100) as connections, new_session() as session:
        try:
            outcome = await request_status(session, driver, 8100)
        except Exception as error:
            outcome = error
    return outcome, sum(connection.num_bytes for connection in connections)


def answering(body, headers=b""):
    async def answer(connection):
        await connection.answer(body, headers)

    return answer


@pytest.mark.parametrize("behaviour", PROBLEMS, ids=lambda behaviour: behaviour.__name__)
async def test_hostile_answer_is_bounded_and_named(behaviour, monkeypatch):
    monkeypatch.setattr(driver_request, "TIMEOUT_SECONDS", 0.5 if behaviour in (hang, trickle) else 30.0)
    outcome, num_bytes = await ask(behaviour)
    if behaviour in (hang, trickle):
        assert isinstance(outcome, TimeoutError)
    else:
        assert isinstance(outcome, UnreadableAnswerError), outcome
        assert PROBLEMS[behaviour] in str(outcome)
    assert num_bytes < _SOCKET_BUFFERS


async def test_largest_answer_is_read_and_one_byte_more_is_not():
    body = b'{"step": 3}'
    largest = body + b" " * (MAX_ANSWER_BYTES - len(body))
    assert (await ask(answering(largest)))[0] == DriverStatus(step=3)
    assert isinstance((await ask(answering(largest + b" ")))[0], UnreadableAnswerError)


async def test_connection_that_breaks_is_not_an_unreadable_answer():
    async def end(connection):
        connection._writer.close()

    outcome, _ = await ask(end)
    assert isinstance(outcome, OSError)


async def test_answer_that_ends_early_is_unreadable():
    async def end(connection):
        await connection.write(OK + b'Content-Length: 100\r\n\r\n{"step": 3}')
        connection._writer.close()

    outcome, _ = await ask(end)
    assert isinstance(outcome, UnreadableAnswerError)


HEADERS = st.tuples(
    st.sampled_from([b"Content-Length", b"Transfer-Encoding", b"Content-Encoding", b"Set-Cookie", b"Location", b"X"]),
    st.sampled_from([b"chunked", b"-1", b"1e3", b"gzip, br", b"99999999999999999999", b"a=b; Domain=.", b"\xff\x01"]),
)


@given(
    status=st.sampled_from([b"HTTP/1.1 200 OK", b"HTTP/1.0 200", b"HTTP/9.9 200 OK", b"HTTP/1.1 999 \xff", b"\r\n"]),
    headers=st.lists(HEADERS, max_size=3),
    body=st.binary(max_size=50) | st.just(b'b\r\n{"step": 3}\r\n0\r\n\r\n') | st.just(b'{"step": 3}'),
)
def test_any_bytes_end_in_a_status_or_a_known_error(status, headers, body):
    async def send(connection):
        lines = [status, *(name + b": " + value for name, value in headers)]
        await connection.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        connection._writer.close()

    outcome, _ = asyncio.run(ask(send))
    assert isinstance(outcome, DriverStatus | UnreadableAnswerError | OSError), repr(outcome)


FIELDS = st.sampled_from([*DriverStatus.model_fields, "samples", "message", "mood", "correct"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**30), 2**63, 10**9])
    | st.floats()
    | st.text(st.characters(), max_size=30)
    | st.sampled_from(["\x1b[31m", "\0", "\ud800", "x" * 3000])
)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=10) | st.dictionaries(FIELDS, inner, max_size=6))


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_a_bounded_status_or_unreadable(body):
    try:
        status = parse_status(body)
    except UnreadableAnswerError as error:
        problem = str(error)
    else:
        problem = ""
        text = status.model_dump_json()
        assert len(text) < 2 * MAX_ANSWER_BYTES
        assert parse_status(text.encode()) == status
    assert problem.isprintable()
    assert len(problem) <= 200


def test_last_of_equal_keys_counts():
    assert parse_status(b'{"step": 1, "step": 2}').step == 2
