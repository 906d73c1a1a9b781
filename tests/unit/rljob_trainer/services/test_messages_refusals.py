"""Whether a refusal concerns one sample or all is decided by a request that was answered before."""

import asyncio

import aiohttp
import pytest

from rljob_trainer.services.messages import Refusals


class Endpoint:
    def __init__(self, answer=200):
        self.answer, self.bodies, self.go = answer, [], asyncio.Event()
        self.go.set()

    async def post(self, body):
        self.bodies.append(body)
        await self.go.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def after_answers(endpoint, *bodies):
    refusals = Refusals(endpoint.post)
    for body in bodies:
        refusals.record_answer(body)
    return refusals


async def test_last_answered_request_is_sent_again():
    endpoint = Endpoint()
    assert not Refusals(endpoint.post).has_answered
    assert await after_answers(endpoint, b"first", b"last").is_answering()
    assert endpoint.bodies == [b"last"]


@pytest.mark.parametrize("status", [200, 429])
async def test_endpoint_that_takes_what_it_answered_is_answering(status):
    assert await after_answers(Endpoint(status), b"x").is_answering()


@pytest.mark.parametrize("answer", [400, 401, 404, 422, 500, 503, TimeoutError(), aiohttp.ClientError()])
async def test_endpoint_that_fails_what_it_answered_is_away(answer):
    assert not await after_answers(Endpoint(answer), b"x").is_answering()


async def test_refusals_at_the_same_time_share_a_probe_and_later_ones_do_not():
    endpoint = Endpoint()
    refusals = after_answers(endpoint, b"x")
    endpoint.go.clear()
    asked = [asyncio.create_task(refusals.is_answering()) for _ in range(8)]
    await asyncio.sleep(0)
    asked[0].cancel()
    endpoint.go.set()
    assert await asyncio.gather(*asked[1:]) == [True] * 7, "one caller that is cancelled does not end it"
    assert len(endpoint.bodies) == 1
    endpoint.answer = 503
    assert not await refusals.is_answering()
