"""The order of a model's commands, and results that are asked for again."""

from __future__ import annotations

import asyncio

import pytest

from rljob_trainer.tinker import streams
from rljob_trainer.tinker.streams import Futures, Stream, Turns
from rljob_trainer.tinker.wire import RefusedError


class Commands:
    """Commands of one stream, which finish when the test lets them."""

    def __init__(self) -> None:
        self.stream, self.begun, self.gates = Stream(Turns()), list[int](), dict[int, asyncio.Event]()

    async def send(self, number: int) -> asyncio.Task[streams.Result]:
        async def work() -> streams.Result:
            self.begun.append(number)
            await self.gates[number].wait()
            return {"number": number}

        self.gates[number] = asyncio.Event()
        task = asyncio.create_task(self.stream.run(number, work))
        await settle()
        return task

    async def finish(self, number: int) -> None:
        self.gates[number].set()
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_commands_run_one_after_the_other_whatever_their_order_of_arrival():
    commands = Commands()
    tasks = [await commands.send(number) for number in (2, 0, 1)]
    assert commands.begun == [0]
    await commands.finish(0)
    assert commands.begun == [0, 1]
    await commands.finish(1)
    await commands.finish(2)
    assert [task.result() for task in tasks] == [{"number": number} for number in (2, 0, 1)]
    assert not commands.stream.is_busy


async def test_a_command_that_fails_does_not_stop_the_next_one():
    stream = Stream(Turns())

    async def fail() -> streams.Result:
        raise RefusedError("wrong")

    async def succeed() -> streams.Result:
        return {}

    tasks = [asyncio.create_task(stream.run(number, work)) for number, work in enumerate((fail, succeed))]
    await settle()
    with pytest.raises(RefusedError, match="wrong"):
        tasks[0].result()
    assert tasks[1].result() == {}


async def test_a_number_is_used_once():
    commands = Commands()
    for number in (0, 1):
        await commands.send(number)
    await commands.finish(0)
    for number in (0, 1):
        with pytest.raises(RefusedError, match=f"seq_id: {number} was used before; the next is 1"):
            await commands.send(number)


async def test_the_end_of_a_model_refuses_what_waits_and_lets_end_what_runs():
    commands = Commands()
    running, waiting, later = [await commands.send(number) for number in (0, 1, 3)]
    commands.stream.end("replaced")
    await settle()
    await commands.finish(0)
    assert running.result() == {"number": 0}
    for task in (waiting, later):
        with pytest.raises(RefusedError, match="replaced"):
            task.result()
    assert commands.begun == [0]


async def test_the_model_with_the_fewest_tokens_has_the_next_turn():
    turns, order = Turns(), list[str]()
    streams_by_name = {name: Stream(turns) for name in "abc"}

    async def run(name: str, number: int, num_tokens: int) -> None:
        async def work() -> streams.Result:
            order.append(name)
            streams_by_name[name].num_tokens += num_tokens
            await asyncio.sleep(0)
            return {}

        await streams_by_name[name].run(number, work)

    async with asyncio.TaskGroup() as group:
        for number in range(2):
            group.create_task(run("a", number, 100))
        for number in range(6):
            group.create_task(run("b", number, 40))
        await asyncio.sleep(0)
    assert order == list("abbbabbb"), "a turn is of the model with the fewest tokens"
    await run("c", 0, 10)
    assert streams_by_name["c"].num_tokens >= 200, "a model that comes later would have all turns until it is even"


async def test_a_command_in_line_for_its_turn_is_refused_once_its_model_has_ended():
    """The ranks may have forgotten its adapter by then, and hold another client's."""
    turns, gate, begun = Turns(), asyncio.Event(), list[str]()
    one, other = Stream(turns), Stream(turns)

    async def wait() -> streams.Result:
        await gate.wait()
        return {}

    async def work() -> streams.Result:
        begun.append("work")
        return {}

    running = asyncio.create_task(one.run(0, wait))
    await settle()
    in_line = asyncio.create_task(other.run(0, work))
    await settle()
    other.end("replaced")
    gate.set()
    await settle()
    assert running.result() == {}
    with pytest.raises(RefusedError, match="replaced"):
        in_line.result()
    assert not begun


async def test_commands_without_tokens_do_not_have_all_turns():
    turns, order = Turns(), list[str]()

    async def run(stream: Stream, name: str, number: int) -> None:
        async def work() -> streams.Result:
            order.append(name)
            await asyncio.sleep(0)
            return {}

        await stream.run(number, work)

    async with asyncio.TaskGroup() as group:
        for num_tokens, name in enumerate("ab"):
            stream = Stream(turns, num_tokens=num_tokens)
            for number in range(3):
                group.create_task(run(stream, name, number))
    assert order == list("ababab")


async def test_a_request_that_comes_again_has_the_result_of_the_first():
    futures, calls = Futures(), list[int]()

    async def work() -> streams.Result:
        calls.append(1)
        return b"result"

    for _ in range(3):
        futures.begin("s:train:0:1", work)
        assert await futures.wait("s:train:0:1", 1.0) == b"result"
    assert calls == [1], "the command was applied more than once"


async def test_a_result_that_is_not_there_yet_is_none():
    futures = Futures()
    done = asyncio.Event()
    futures.begin("s:1", done.wait)  # type: ignore[arg-type]
    assert await futures.wait("s:1", 0.0) is None
    futures.begin("s:2", asyncio.Event().wait)  # type: ignore[arg-type]
    futures._tasks["s:2"].cancel()
    await settle()
    futures.forget("s")
    await settle()
    assert ("s:1" in futures, "s:2" in futures) == (True, False), "work was dropped that is not done"
    done.set()
    await settle()
    assert "s:1" not in futures, "a result of a session that has ended is never dropped"


async def test_old_results_are_dropped_once_they_were_taken(monkeypatch):
    monkeypatch.setattr(streams, "NUM_KEPT", 2)
    futures = Futures()

    async def work() -> streams.Result:
        return {}

    for number in range(4):
        futures.begin(f"s:{number}", work)
    await futures.wait("s:1", 1.0)
    await futures.wait("s:1", 1.0)
    await futures.wait("s:2", 1.0)
    assert "s:1" in futures
    await futures.wait("s:3", 1.0)
    assert [number for number in range(4) if f"s:{number}" in futures] == [0, 2, 3]
    for number in range(4):
        futures.begin(f"other:{number}", work)
        await futures.wait(f"other:{number}", 1.0)
    assert "s:2" in futures, "what another session took drops a result of this one"
