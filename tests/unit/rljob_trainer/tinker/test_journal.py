"""What a service goes on from: whatever dies, and when, each command is applied once, and has one result."""

from __future__ import annotations

import asyncio
import json
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from rljob_api.errors import TransientError, UserError
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.tinker import journal as journal_module
from rljob_trainer.tinker import service as service_module
from rljob_trainer.tinker.journal import Journal, Snapshot
from rljob_trainer.tinker.service import GoneError, Service
from rljob_trainer.tinker.wire import ModelLimits

NAME = "org/model"


def make(folder: Path) -> None:
    folder.mkdir()


def write(file: Path, state: list[Any]) -> None:
    file.write_text(json.dumps(state))


class Killed(BaseException):
    """The program has ended here."""


class Fuse:
    """Counts what happens, and lets something die."""

    def __init__(self, kills: dict[int, str]) -> None:
        self.kills, self.count, self.is_dead, self.kills_ranks = kills, 0, False, False

    def step(self) -> None:
        self.count += 1
        kind = self.kills.get(self.count, "")
        self.is_dead |= kind == "program"
        self.kills_ranks |= kind == "ranks"
        if self.is_dead:
            raise Killed


class FusedJournal(Journal):
    fuse: Fuse

    def _write(self, *statements: Any) -> None:
        self.fuse.step()
        super()._write(*statements)
        self.fuse.step()


class Ranks:
    """Hold one model, as the list of what was applied to it. A checkpoint has no gradient."""

    def __init__(self, world: World) -> None:
        self.world, self.end = world, asyncio.Event()
        self.state, self.sleeping = list[Any](), dict[str, list[Any]]()

    @property
    def has_ended(self) -> bool:
        return self.end.is_set()

    async def step(self) -> None:
        await asyncio.sleep(0)
        fuse = self.world.fuse
        fuse.step()
        if fuse.kills_ranks:
            fuse.kills_ranks = False
            self.end.set()
            self.world.begin(self.world.use_new_ranks())
        if self.has_ended:
            raise TrainerGroupDiedError("a rank died")

    async def call(self, function: Any, *arguments: Any) -> list[Any]:
        await self.step()
        result = getattr(self, function.__name__)(*arguments)
        await self.step()
        return [result]

    def hold(self, before: str, model: str, models: list[str]) -> None:
        self.sleeping[before] = self.state
        self.state = self.sleeping.pop(model, ["nothing"])
        self.sleeping = {key: value for key, value in self.sleeping.items() if key in models}

    def create(self, rank: int, seed: int) -> None:
        self.state = [("create", rank, seed)]

    def load(self, folder: Path, rank: int, with_optimizer: bool) -> None:
        saved = json.loads((folder / "state").read_text())
        self.state = saved if with_optimizer else [("without the optimizer's state", saved)]

    def update(self, adam: dict[str, float]) -> tuple[float, int]:
        self.state = [*self.state, ("update", adam["learning_rate"])]
        return 0.5, self.num_updates

    @property
    def num_updates(self) -> int:
        return sum(each[0] == "update" for each in self.state)

    def write_adapter(self, folder: Path, rank: int) -> None:
        folder.mkdir()

    async def call_with_rows(self, function: Any, rows: Any, facts: Any, loss: str, _: Any, backward: bool) -> Any:
        await self.step()
        if backward:
            self.state = [*self.state, ("gradient", int(rows[0].token_ids[0]))]
        digest = zlib.crc32(json.dumps(self.state).encode()) >> 9  # a float has 24 bits
        await self.step()
        return [np.full(len(row.token_ids), digest, np.float32) for row in rows], [1.0]

    async def save(self, folder: Path) -> None:
        await self.step()
        make(folder)
        last = max((i for i, each in enumerate(self.state) if each[0] != "gradient"), default=-1)
        write(folder / "state", self.state[: last + 1])

    async def saved(self) -> None:
        await self.step()

    async def wait_until_ended(self, _: float) -> None:
        await self.end.wait()
        raise TrainerGroupDiedError("a rank died")


class World:
    """A service, its ranks, and a client that sends again what was not answered."""

    def __init__(self, folder: Path, kills: dict[int, str]) -> None:
        self.folder, self.fuse, self.now, self.tasks = folder, Fuse(kills), 0.0, set[asyncio.Task[Any]]()
        self.start()

    def start(self) -> None:
        self.journal = FusedJournal(self.folder / "journal.sqlite", "a model")
        self.journal._db.execute("PRAGMA synchronous = OFF")  # what the kernel has is not lost here
        self.journal.fuse = self.fuse
        limits = ModelLimits(8, 100)
        self.service = Service(
            self.journal,
            name=NAME,
            tokenizer=NAME,
            limits=limits,
            max_rank=8,
            max_adapters=4,
            root=self.folder,
            clock=self.tick,
        )
        self.service.restore()
        self.begin(self.use_new_ranks())

    def tick(self) -> float:
        self.now += 0.001
        return self.now

    def begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def use_new_ranks(self) -> None:
        await self.service.use(Ranks(self), SimpleNamespace(sample=self.sample))  # type: ignore[arg-type]

    async def sample(self, folder: Path | None, _: Any) -> bytes:
        return (folder.name if folder else "base").encode()

    def restart(self) -> None:
        for each in self.service.futures._tasks.values():
            each.cancel()
        self.journal.close()
        self.fuse.is_dead = False
        while True:
            try:
                return self.start()
            except Killed:
                self.journal.close()
                self.fuse.is_dead = False

    def send(self, path: str, body: bytes | dict[str, Any]) -> dict[str, Any]:
        given = body if isinstance(body, bytes) else json.dumps(body).encode()
        while True:
            try:
                return self.service.accept("ann", path, given)
            except Killed:
                self.restart()

    def open_session(self) -> str:
        fields = {"tags": [], "user_metadata": None, "sdk_version": "0.38"}
        return str(self.send("create_session", fields)["session_id"])

    def create_model(self, session: str, number: int) -> str:
        lora = {"rank": 4, "seed": number}
        body = {"session_id": session, "model_seq_id": number, "base_model": NAME, "lora_config": lora}
        return str(self.send("create_model", body)["request_id"])

    async def result(self, request_id: str) -> Any:
        while True:
            try:
                found = await self.service.retrieve("ann", request_id, 5.0)
            except (Killed, asyncio.CancelledError):
                self.restart()
            else:
                assert found is not None, "it waits for ever"
                return found


Plan = list[tuple[int, str]]
"""Which of two models does what."""
COMMANDS = ("forward_backward", "forward", "optim_step", "save_weights", "load_weights", "sampler", "wrong", "result")


def build(command: str, model: str, number: int) -> tuple[str, bytes | dict[str, Any]]:
    common = {"model_id": model, "seq_id": number}
    match command:
        case "forward_backward" | "forward":
            inputs: dict[str, Any] = {"target_tokens": [2, 3]}
            tokens = types.ModelInput.from_ints([number % 50, 1])
            data = types.ForwardBackwardInput(
                data=[types.Datum(model_input=tokens, loss_fn_inputs=inputs)], loss_fn="cross_entropy"
            )
            request = types.ForwardBackwardRequest(forward_backward_input=data, model_id=model, seq_id=number)
            message: Any = forward_backward_request_to_proto(request)
            message.forward_only = command == "forward"
            return "forward_backward", message.SerializeToString()
        case "optim_step":
            return command, common | {"optim_params": {"learning_rate": 1 / number}}
        case "save_weights":
            return command, common | {"path": "one", "overwrite": number % 2 == 0}
        case "load_weights":
            return command, common | {"path": f"tinker://{model}/weights/one", "optimizer": number % 3 > 0}
        case "sampler":
            return "save_weights_for_sampler", common | {"sampling_session_seq_id": number}
        case _:
            return "no_such_command", common


async def run(plan: Plan, kills: dict[int, str], num_tries: int = 100) -> tuple[list[Any], int]:
    """Return the results of all commands, in which the session has no name, and what was counted."""
    with tempfile.TemporaryDirectory() as folder, patch.object(service_module, "_NUM_TRIES", num_tries):
        world = World(Path(folder), kills)
        session = world.open_session()
        ids, models, numbers = list[str](), list[str](), [0, 0]
        for number in range(2):
            ids.append(world.create_model(session, number))
            models.append((await world.result(ids[-1]))["model_id"])
        for which, command in plan:
            if command == "result":
                await world.result(ids[-1])
                continue
            numbers[which] += 1
            ids.append(world.send(*build(command, models[which], numbers[which]))["request_id"])
        results = [await world.result(each) for each in ids]
        for each in (each for each in results if isinstance(each, dict) and "sampling_session_id" in each):
            assert world.service.get_sampler("ann", each["sampling_session_id"])
        for each in world.tasks:
            each.cancel()
        world.journal.close()
        return [
            json.loads(json.dumps(each).replace(session, "s")) if isinstance(each, dict) else each for each in results
        ], world.fuse.count


plans = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(COMMANDS)), min_size=1, max_size=12)
kills = st.dictionaries(st.integers(1, 120), st.sampled_from(["program", "ranks"]), max_size=3)


@settings(deadline=None, max_examples=25)
@given(plans, kills, st.sampled_from([0.0, 0.004, 100.0]))
def test_whatever_dies_the_results_are_those_of_an_undisturbed_run(plan, kills, seconds):
    with patch.object(service_module, "_REPLAY_SECONDS", seconds):
        assert asyncio.run(run(plan, kills))[0] == asyncio.run(run(plan, {}))[0]


@pytest.mark.parametrize("kind", ["program", "ranks"])
def test_each_moment_of_a_loop_is_one_to_die_in(kind):
    plan: Plan = [(0, "forward_backward"), (1, "forward_backward"), (0, "optim_step"), (0, "save_weights")]
    plan += [(1, "sampler"), (0, "load_weights"), (1, "optim_step"), (0, "forward")]
    with patch.object(service_module, "_REPLAY_SECONDS", 0.002):
        expected, count = asyncio.run(run(plan, {}))
        for moment in range(1, count + 1):
            assert asyncio.run(run(plan, {moment: kind}))[0] == expected, f"it died at {moment} of {count}"


async def test_a_command_whose_ranks_die_each_time_is_taken_to_be_the_reason(tmp_path, monkeypatch):
    world = World(tmp_path, {})
    session = world.open_session()
    model = (await world.result(world.create_model(session, 0)))["model_id"]
    update = Ranks.update

    def die(self: Ranks, adam: dict[str, float]) -> tuple[float, int]:
        if adam["learning_rate"] == 0.5:
            world.fuse.kills_ranks = True
        return update(self, adam)

    monkeypatch.setattr(Ranks, "update", die)
    ids = [world.send(*build("optim_step", model, number))["request_id"] for number in (1, 2, 3)]
    results = [await world.result(each) for each in ids]
    assert results[1] == {"error": "a rank died; see the service's log", "category": "server"}
    assert [each["metrics"]["num_updates"] for each in (results[0], results[2])] == [1, 2]
    world.restart()
    assert [await world.result(each) for each in ids] == results
    world.journal.close()


async def test_a_session_that_was_closed_holds_no_place_after_a_restart(tmp_path):
    world = World(tmp_path, {})
    session = world.open_session()
    for number in range(4):  # as many as may be
        await world.result(world.create_model(session, number))
    world.service.finish_session("ann", session)
    world.restart()
    assert "model_id" in await world.result(world.create_model(world.open_session(), 0))
    world.journal.close()


async def test_a_refused_command_is_passed_over_when_its_model_is_made_again(tmp_path, monkeypatch):
    world = World(tmp_path, {})
    model = (await world.result(world.create_model(world.open_session(), 0)))["model_id"]
    update = Ranks.update

    def refuse(self: Ranks, adam: dict[str, float]) -> tuple[float, int]:
        if adam["learning_rate"] == 1.0:
            raise UserError("no such rate")
        return update(self, adam)

    monkeypatch.setattr(Ranks, "update", refuse)
    first, second = (world.send(*build("optim_step", model, number))["request_id"] for number in (1, 2))
    assert await world.result(first) == {"error": "no such rate", "category": "user"}
    await world.result(second)
    world.restart()
    third = world.send(*build("optim_step", model, 3))["request_id"]
    assert (await world.result(third))["metrics"]["num_updates"] == 2
    world.journal.close()


async def test_a_model_that_ends_while_its_snapshot_is_written_leaves_no_files(tmp_path, monkeypatch):
    world = World(tmp_path, {})
    model = (await world.result(world.create_model(world.open_session(), 0)))["model_id"]
    saved = Ranks.saved

    async def end(self: Ranks) -> None:
        world.service._end(world.service._models[model], "another client needs its place")
        await saved(self)

    monkeypatch.setattr(Ranks, "saved", end)
    with patch.object(service_module, "_REPLAY_SECONDS", 0.0):
        await world.result(world.send(*build("optim_step", model, 1))["request_id"])
    assert not [*tmp_path.glob(".snapshots/*")]
    assert not world.journal.read_snapshots()
    world.journal.close()


async def test_snapshots_of_models_that_are_gone_are_removed(tmp_path):
    world = World(tmp_path, {})
    with patch.object(service_module, "_REPLAY_SECONDS", 0.0):
        model = (await world.result(world.create_model(world.open_session(), 0)))["model_id"]
        await world.result(world.send(*build("optim_step", model, 1))["request_id"])
    [kept] = tmp_path.glob(".snapshots/*")
    (tmp_path / ".snapshots/of-another/one").mkdir(parents=True)
    world.restart()
    assert [*tmp_path.glob(".snapshots/*")] == [kept]
    world.journal.close()


def test_a_journal_that_is_damaged_or_in_use_is_named_with_the_way_out(tmp_path, monkeypatch):
    file = tmp_path / "journal.sqlite"
    journal = Journal(file, "a model")
    connect = journal_module.sqlite3.connect
    monkeypatch.setattr(journal_module.sqlite3, "connect", lambda name: connect(name, timeout=0))
    with pytest.raises(TransientError, match=r"journal.sqlite: database is locked"):
        Journal(file, "a model")
    journal.close()
    file.write_bytes(b"no database, but some text of another program" * 100)
    with pytest.raises(UserError, match=r"journal.sqlite is damaged: .*; restore it, or remove it"):
        Journal(file, "a model")


async def test_a_sample_is_done_again_by_new_ranks_and_asked_for_again_by_its_client(tmp_path, monkeypatch):
    world, gate = World(tmp_path, {}), asyncio.Event()
    session = world.open_session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    sampler = world.send("create_sampling_session", body)["sampling_session_id"]
    chunks = [{"type": "encoded_text", "tokens": [1]}]
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": chunks}, "sampling_params": {}}
    begun = asyncio.Queue[Any]()

    async def sample(*_: Any) -> bytes:
        assert world.service._ranks is not None
        begun.put_nowait(world.service._ranks[0])
        await gate.wait()
        return b"sample"

    monkeypatch.setattr(world, "sample", sample)
    await world.use_new_ranks()
    request_id = world.send("asample", body)["request_id"]
    (await begun.get()).end.set()
    await world.use_new_ranks()
    assert not (await begun.get()).has_ended
    gate.set()
    assert await world.result(request_id) == b"sample"
    world.restart()
    with pytest.raises(GoneError, match="ask for it again"):
        await world.service.retrieve("ann", request_id, 0.0)
    assert world.send("asample", body)["request_id"] == request_id, "the sampler is gone, too"
    world.journal.close()


def test_the_journal_has_the_last_results_and_no_request_that_is_not_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "NUM_KEPT", 2)
    journal = Journal(tmp_path / "journal", "a model")
    journal.add("s", 0, "ann", "create_session", b"{}")
    for number in range(6):
        journal.add("s:train:0", number, "ann", "optim_step", b"body")
        journal.add("s:train:0", number, "ann", "optim_step", b"a retry")
        journal.finish("s:train:0", number, {"number": number}, changes=number != 1)
    found = [(each.number, each.body, each.result) for each in journal.read()[1:]]
    assert found == [(n, b"body", {"number": n}) for n in (0, 2, 3, 4, 5)], "a command that changed nothing is old"
    journal.cut("s:train:0", 4, Snapshot(8, "folder"))
    journal.finish("s:train:0", 6, b"result", changes=False)
    assert [(each.number, each.body) for each in journal.read()[1:]] == [(0, b""), (5, b"body")]
    journal.close()
    journal = Journal(tmp_path / "journal", "a model")
    assert journal.read_snapshots() == {"s:train:0": Snapshot(8, "folder")}
    journal.drop("s")
    assert (journal.read(), journal.read_snapshots()) == ([], {})
    journal.add("s", 0, "ann", "create_session", b"{}")
    journal.close()
    assert Journal(tmp_path / "journal", "another model").read() == []
