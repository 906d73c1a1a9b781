"""Whether the engine hangs: by its own answers, and by what it works on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rljob_api.manifest.job_sections import HangDetection
from rljob_trainer.liveness.judge import Hang, Judge, Pace
from rljob_trainer.rollout import engine_watch
from rljob_trainer.rollout.engine_watch import EngineWatch, count_outputs

MIN_SECONDS, MAX_SECONDS = 60, 7200


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - simulated time has no event
        await asyncio.sleep(0)


class Engine:
    """An engine in simulated time: a second passes while it is asked."""

    def __init__(self, monkeypatch: Any) -> None:
        self.now, self.num_answers = 0.0, 0
        self.is_running, self.is_loading, self.error = False, False, None
        self.num_outputs, self.gives_tokens, self.seconds_per_answer = 0, True, 0.01
        self.busy_until = 0.0
        """It answers once this time has come."""
        self.bounds = HangDetection(min_seconds=MIN_SECONDS, max_seconds=MAX_SECONDS)
        self.judge = Judge(Pace(self.bounds), 0.0)
        self.watch = EngineWatch(
            self.judge,
            lambda: self.bounds,
            self.ask,
            lambda: self.is_running,
            lambda: self.is_loading,
            self.count,
            lambda: self.now,
        )
        monkeypatch.setattr(engine_watch, "_PERIOD_SECONDS", 0.0)

    def count(self) -> int:
        self.num_outputs += self.gives_tokens
        return self.num_outputs

    async def ask(self) -> bool:
        while self.now < self.busy_until:
            self.now += 1
            await asyncio.sleep(0)
        self.now += self.seconds_per_answer
        self.num_answers += 1
        if self.error:
            raise self.error
        return False

    async def run(self, num_answers: int) -> Hang | None:
        """Return the hang, or None once there are so many answers."""
        running = asyncio.create_task(self.watch.run())
        target = self.num_answers + num_answers
        await _until(lambda: self.num_answers >= target or running.done())
        if not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return None
        return running.result()


@pytest.fixture
def engine(monkeypatch: Any) -> Engine:
    return Engine(monkeypatch)


async def test_an_engine_that_answers_no_more_hangs_after_the_floor(engine: Engine) -> None:
    assert await engine.run(5) is None
    engine.busy_until = 1e9
    hang = await engine.run(1)
    assert hang is not None
    assert (hang.kind, hang.limit_seconds) == ("an answer without requests", MIN_SECONDS)
    assert MIN_SECONDS < hang.seconds < MIN_SECONDS + 10
    assert engine.watch.reason_silent() != ""


async def test_changed_bounds_hold_for_what_runs_already(engine: Engine) -> None:
    assert await engine.run(5) is None
    engine.busy_until = 1e9
    engine.bounds = HangDetection(min_seconds=10 * MIN_SECONDS, max_seconds=MAX_SECONDS)
    hang = await engine.run(1)
    assert hang is not None
    assert hang.limit_seconds == 10 * MIN_SECONDS


async def test_a_first_step_or_load_may_take_the_ceiling(engine: Engine) -> None:
    await engine.run(5)
    engine.is_running = True
    engine.busy_until = engine.now + 600  # a compilation
    assert await engine.run(1) is None
    engine.is_loading = True
    engine.busy_until = engine.now + 3000
    assert await engine.run(1) is None


async def test_long_steps_are_the_measure_of_steps_and_not_of_an_idle_engine(engine: Engine) -> None:
    engine.is_running = True
    for _ in range(5):
        engine.busy_until = engine.now + 30
        await engine.run(1)
    engine.busy_until = engine.now + 20 * 30
    assert await engine.run(1) is None, "a prefill of 20 times the usual step"
    engine.is_running = False
    await engine.run(3)
    engine.busy_until = 1e9
    hang = await engine.run(1)
    assert hang is not None
    assert hang.limit_seconds == MIN_SECONDS


async def test_a_load_that_begins_while_the_engine_is_asked_counts_as_a_load(engine: Engine) -> None:
    await engine.run(5)
    engine.busy_until = engine.now + 600
    running = asyncio.create_task(engine.watch.run())
    await _until(lambda: engine.now > engine.busy_until - 590)
    engine.is_loading = True
    await _until(lambda: engine.now > engine.busy_until)
    assert not running.done()
    running.cancel()


async def test_a_dead_engine_does_not_hang(engine: Engine) -> None:
    engine.error = ValueError("EngineDeadError")
    assert await engine.run(20) is None
    assert await engine.watch.check(1.0) == "the engine does not answer"


async def test_a_check_asks_anew(engine: Engine) -> None:
    assert await engine.watch.check(1.0) == ""
    engine.ask = lambda: asyncio.sleep(100)  # type: ignore[method-assign, assignment]
    engine.watch = EngineWatch(engine.judge, HangDetection, engine.ask, lambda: False, lambda: False, lambda: 0)
    assert await engine.watch.check(0.01) == "the engine does not answer"


async def test_an_engine_that_answers_and_puts_out_nothing_for_its_requests_hangs(engine: Engine) -> None:
    """As with a scheduler that can never run what it has."""
    engine.is_running = True
    assert await engine.run(5) is None
    engine.gives_tokens = False
    engine.seconds_per_answer = 1.0
    hang = await engine.run(1000)
    assert hang is not None
    assert (hang.kind, hang.limit_seconds) == ("tokens of its requests", MIN_SECONDS)


@pytest.mark.parametrize("state", [{"is_running": False}, {"is_loading": True}])
async def test_no_tokens_are_owed_without_requests_or_during_a_load(engine: Engine, state: dict[str, bool]) -> None:
    engine.is_running = True
    await engine.run(5)
    engine.gives_tokens, engine.seconds_per_answer = False, 1.0
    for name, value in state.items():
        setattr(engine, name, value)
    assert await engine.run(500) is None


def test_outputs_with_tokens_are_counted() -> None:
    class Processor:
        def process_outputs(self, outputs: list[int], factor: int) -> list[int]:
            return [factor * each for each in outputs]

    processor = Processor()
    count = count_outputs(processor)
    assert [processor.process_outputs([2], 3), processor.process_outputs([], factor=3)] == [[6], []]
    assert count() == 1
