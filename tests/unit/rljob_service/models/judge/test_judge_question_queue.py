from __future__ import annotations

import asyncio

import pytest

from rljob_service.models.judge.judge import QuestionQueue


class FakeLimiter:
    """Admits `free` questions at once."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.released: list[tuple[float, float | None]] = []

    def required_wait(self) -> tuple[float, str]:
        return (0.0, "") if self.free else (float("inf"), "concurrency")

    def admit(self) -> float:
        assert self.free > 0, "not admitted"
        self.free -= 1
        return 7.0

    def release(self, charged: float, used: float | None) -> None:
        self.free += 1
        self.released.append((charged, used))


class Questions:
    """Questions that end when the test sets their event."""

    def __init__(self, queue: QuestionQueue) -> None:
        self.queue = queue
        self.started: list[int] = []
        self.ends: dict[int, asyncio.Event] = {}

    async def ask(self, number: int, used: float | None = None) -> None:
        self.ends[number] = asyncio.Event()
        async with self.queue.acquire() as progress:
            self.started.append(number)
            progress.used = used
            await self.ends[number].wait()

    async def settled(self, count: int) -> None:
        """Let the event loop start all admitted questions."""
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(self.started) >= count


async def run_questions(questions: Questions, total: int, at_once: int) -> None:
    tasks = [asyncio.create_task(questions.ask(number)) for number in range(total)]
    for ended in range(total):
        expected = min(total, ended + at_once)
        await questions.settled(expected)
        assert questions.started == list(range(expected)), "in order of arrival, as many as are admitted"
        questions.ends[ended].set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(("free", "size", "at_once"), [(2, 5, 2), (5, 2, 2), (1, 1, 1)])
async def test_questions_start_in_order_within_limiter_and_slots(free, size, at_once):
    waits: list[tuple[str, float]] = []
    limiter = FakeLimiter(free)
    queue = QuestionQueue(limiter, size, 30, lambda limit, seconds: waits.append((limit, seconds)))
    await run_questions(Questions(queue), 6, at_once)
    assert limiter.free == free
    assert all(limit == "concurrency" for limit, _ in waits)
    assert bool(waits) == (free < size), "waiting for a slot is not waiting for a limit"


async def test_charge_is_settled_when_a_question_ends_or_is_cancelled():
    limiter = FakeLimiter(2)
    questions = Questions(QuestionQueue(limiter, 2, 30, lambda limit, seconds: None))
    done = asyncio.create_task(questions.ask(0, used=5.0))
    cancelled = asyncio.create_task(questions.ask(1))
    waiting = asyncio.create_task(questions.ask(2))
    await questions.settled(2)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await questions.settled(3)
    waiting.cancel()
    questions.ends[0].set()
    await asyncio.gather(done, waiting, return_exceptions=True)
    assert limiter.released[0] == (7.0, None), "the cancelled question"
    assert set(limiter.released[1:]) == {(7.0, 5.0), (7.0, None)}
    assert limiter.free == 2


async def test_question_cancelled_while_waiting_does_not_block_others():
    limiter = FakeLimiter(1)
    questions = Questions(QuestionQueue(limiter, 9, 30, lambda limit, seconds: None))
    tasks = [asyncio.create_task(questions.ask(number)) for number in range(3)]
    await questions.settled(1)
    tasks[1].cancel()
    questions.ends[0].set()
    await questions.settled(2)
    assert questions.started == [0, 2]
    questions.ends[2].set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert limiter.free == 1
