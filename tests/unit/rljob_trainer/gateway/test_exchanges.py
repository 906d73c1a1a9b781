"""Which request gets which answer."""

from __future__ import annotations

import asyncio

import pytest

from rljob_trainer.gateway.exchanges import Exchange, Exchanges, Sampled
from rljob_trainer.gateway.types import RequestError

BODY, OTHER = b"body", b"other"
GONE = RequestError(410, "episode_ended", "ended")


class Attempt:
    """Exchanges whose answers are numbers, given by hand."""

    def __init__(self, retry_seconds: float = 60.0) -> None:
        self.exchanges = Exchanges(retry_seconds)
        self.answers: list[asyncio.Future[int]] = []
        self.recorded: list[int] = []

    def join(self, digest: bytes = BODY, *, is_retry: bool = False) -> Exchange:
        exchange = self.exchanges.find(digest, is_retry=is_retry)
        if exchange is None:
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self.answers.append(future)
            exchange = Exchange(digest, self._sample(future), now=float(len(self.answers)))
            self.exchanges.add(exchange)
        self.exchanges.enter(exchange)
        return exchange

    async def _sample(self, future: asyncio.Future[int]) -> Sampled:
        number = await future

        async def record() -> None:
            await asyncio.sleep(0)
            self.recorded.append(number)

        return Sampled(number, record, 0.0, 0.0)  # type: ignore[arg-type]

    async def deliver(self, exchange: Exchange) -> int:
        await exchange.wait()
        sampled = await self.exchanges.take(exchange)
        exchange.is_delivered = True
        self.exchanges.leave(exchange)
        return sampled.answer  # type: ignore[return-value]


async def test_two_identical_requests_are_two_samples():
    attempt = Attempt()
    first, second = attempt.join(), attempt.join()
    assert first is not second

    for number, future in enumerate(attempt.answers):
        future.set_result(number)
    assert [await attempt.deliver(each) for each in (first, second)] == [0, 1]

    assert attempt.join() not in (first, second), "also after both were delivered"


async def test_a_request_whose_client_left_is_answered_when_it_is_repeated():
    attempt = Attempt()
    first = attempt.join()
    attempt.exchanges.leave(first)
    assert attempt.join(OTHER) is not first
    assert attempt.join() is first
    assert attempt.join() is not first, "only one repetition is due"


async def test_an_answer_that_came_after_its_client_left_is_kept_for_the_repetition():
    attempt = Attempt()
    first = attempt.join()
    attempt.exchanges.leave(first)
    attempt.answers[0].set_result(7)
    await first.wait()
    assert not attempt.recorded, "no client took it"

    assert await attempt.deliver(attempt.join()) == 7
    assert attempt.recorded == [7]


async def test_a_retry_joins_a_request_that_seems_to_wait():
    attempt = Attempt()
    first = attempt.join()
    assert attempt.join(is_retry=True) is first
    attempt.answers[0].set_result(7)
    assert [await attempt.deliver(first), await attempt.deliver(first)] == [7, 7]
    assert attempt.recorded == [7], "one turn"


async def test_a_retry_gets_the_delivered_answer_again():
    attempt = Attempt()
    first = attempt.join()
    attempt.answers[0].set_result(7)
    await attempt.deliver(first)
    assert await attempt.deliver(attempt.join(is_retry=True)) == 7
    assert attempt.recorded == [7]


async def test_a_retry_of_an_unknown_request_is_sampled():
    attempt = Attempt()
    assert attempt.join(is_retry=True) is not attempt.join(OTHER, is_retry=True)
    assert len(attempt.answers) == 2


async def test_delivered_answers_are_not_kept_without_bound():
    attempt = Attempt()
    for number in range(50):
        exchange = attempt.join(str(number).encode())
        attempt.answers[-1].set_result(number)
        await attempt.deliver(exchange)
    assert len(attempt.exchanges._exchanges) == 8
    assert attempt.exchanges.num_turns == 50


async def test_an_error_is_not_repeated():
    attempt = Attempt()
    first = attempt.join()
    attempt.answers[0].set_exception(RequestError(400, "x", "no"))
    await first.wait()
    with pytest.raises(RequestError, match="no"):
        await attempt.exchanges.take(first)
    attempt.exchanges.leave(first)

    assert attempt.exchanges.num_turns == 0
    assert attempt.join(is_retry=True) is not first


async def test_a_request_that_is_not_repeated_is_cancelled():
    attempt = Attempt(retry_seconds=0.0)
    first = attempt.join()
    attempt.exchanges.leave(first)
    await first.wait()

    assert first.task.cancelled()
    assert attempt.exchanges.num_turns == 0
    assert attempt.join() is not first


async def test_answers_that_may_still_be_taken_count_as_turns():
    attempt = Attempt()
    first, second = attempt.join(), attempt.join(OTHER)
    attempt.exchanges.leave(second)
    assert attempt.exchanges.num_turns == 2
    attempt.answers[0].set_result(1)
    await attempt.deliver(first)
    assert attempt.exchanges.num_turns == 2


async def test_closing_cancels_all_and_gives_the_reason():
    attempt = Attempt()
    waiting, done = attempt.join(), attempt.join()
    attempt.answers[1].set_result(1)
    await done.wait()
    attempt.exchanges.close(GONE)
    for exchange in (waiting, done):
        await exchange.wait()
        with pytest.raises(RequestError, match="ended"):
            await attempt.exchanges.take(exchange)
        attempt.exchanges.leave(exchange)
    assert not attempt.recorded
    assert waiting.task.cancelled()


async def test_a_client_that_leaves_while_its_answer_is_recorded_leaves_one_turn():
    attempt = Attempt()
    first = attempt.join()
    attempt.answers[0].set_result(7)
    await first.wait()
    taking = asyncio.create_task(attempt.exchanges.take(first))
    await asyncio.sleep(0)
    assert first.recording is not None
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    attempt.exchanges.leave(first)

    assert await attempt.deliver(attempt.join()) == 7
    assert attempt.recorded == [7]


async def test_the_oldest_request_that_waits_is_known():
    attempt = Attempt()
    first, _ = attempt.join(), attempt.join(OTHER)
    assert (attempt.exchanges.waiting_since, attempt.exchanges.num_waiting) == (1.0, 2)
    attempt.answers[0].set_result(1)
    await attempt.deliver(first)
    assert (attempt.exchanges.waiting_since, attempt.exchanges.num_waiting) == (2.0, 1)
