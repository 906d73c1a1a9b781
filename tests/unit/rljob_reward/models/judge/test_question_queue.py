"""Questions wait for the limits in their turn, and none is asked without leave."""

from __future__ import annotations

import asyncio

import pytest

from rljob_reward.models.judge.question_queue import Turns


class PlayedGate:
    """Open for `free` questions at once, and closed for ever beyond that."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.left: list[tuple[float, float | None]] = []

    def closed(self) -> tuple[float, str]:
        return (0.0, "") if self.free else (float("inf"), "concurrency")

    def enter(self) -> float:
        assert self.free > 0, "without leave"
        self.free -= 1
        return 7.0

    def leave(self, charged: float, used: float | None) -> None:
        self.free += 1
        self.left.append((charged, used))


class Questions:
    """Questions that end when they are told to."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.begun: list[int] = []
        self.ends: dict[int, asyncio.Event] = {}

    async def ask(self, number: int, used: float | None = None) -> None:
        self.ends[number] = asyncio.Event()
        async with self.turns.take() as progress:
            self.begun.append(number)
            progress.used = used
            await self.ends[number].wait()

    async def settled(self, count: int) -> None:
        """Whoever may begin has begun: nothing here waits for more than a few turns of the loop."""
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(self.begun) >= count


async def run_questions(questions: Questions, total: int, at_once: int) -> None:
    tasks = [asyncio.create_task(questions.ask(number)) for number in range(total)]
    for ended in range(total):
        expected = min(total, ended + at_once)
        await questions.settled(expected)
        assert questions.begun == list(range(expected)), "in their order, as many as may"
        questions.ends[ended].set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(("free", "size", "at_once"), [(2, 5, 2), (5, 2, 2), (1, 1, 1)])
async def test_questions_begin_in_their_order_and_as_many_as_gate_and_places_allow(free, size, at_once):
    waits: list[tuple[str, float]] = []
    gate = PlayedGate(free)
    turns = Turns(gate, size, 30, lambda limit, seconds: waits.append((limit, seconds)))
    await run_questions(Questions(turns), 6, at_once)
    assert gate.free == free
    assert all(limit == "concurrency" for limit, _ in waits)
    assert bool(waits) == (free < size), "waiting for a place is no waiting for a limit"


async def test_what_a_question_was_charged_is_settled_however_it_ends():
    gate = PlayedGate(2)
    questions = Questions(Turns(gate, 2, 30, lambda limit, seconds: None))
    done = asyncio.create_task(questions.ask(0, used=5.0))
    cut_off = asyncio.create_task(questions.ask(1))
    waiting = asyncio.create_task(questions.ask(2))
    await questions.settled(2)
    cut_off.cancel()
    await asyncio.gather(cut_off, return_exceptions=True)
    await questions.settled(3)
    waiting.cancel()
    questions.ends[0].set()
    await asyncio.gather(done, waiting, return_exceptions=True)
    assert gate.left[0] == (7.0, None), "the one that was cut off"
    assert set(gate.left[1:]) == {(7.0, 5.0), (7.0, None)}
    assert gate.free == 2


async def test_who_is_cancelled_while_waiting_takes_nobodys_turn():
    gate = PlayedGate(1)
    questions = Questions(Turns(gate, 9, 30, lambda limit, seconds: None))
    tasks = [asyncio.create_task(questions.ask(number)) for number in range(3)]
    await questions.settled(1)
    tasks[1].cancel()
    questions.ends[0].set()
    await questions.settled(2)
    assert questions.begun == [0, 2]
    questions.ends[2].set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.free == 1
