"""The hand-over between a rank and engines, here in threads, with shared memory in place of the GPU's."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rljob_api.errors import TransientError
from rljob_trainer.weights.hand_over import Channel, HandOver, receive_tensors, socket_path
from tests.support.waiting import wait_for

CPU, BUCKET_BYTES = torch.device("cpu"), 4096
TENSORS = {
    "embedding": torch.randn(100, 64),  # several buckets
    "norm": torch.ones(64, dtype=torch.bfloat16),
    "scale": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "projection": torch.randn(64, 40).T,
}


class World:
    """A rank, and engines in threads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, HandOver(folder, "secret", CPU, BUCKET_BYTES)
        self.threads, self.events, self.streams = ThreadPoolExecutor(8), list[str](), 0

    def ask(self, key: str = "g:1", token: str = "secret") -> Future[dict[str, torch.Tensor]]:
        """Let an engine ask. It has loaded what the future returns."""
        return self.threads.submit(lambda: dict(receive_tensors(self.folder, token, key, CPU)))

    def ask_and_wait(self, number: int = 1) -> list[Future[dict[str, torch.Tensor]]]:
        asking = [self.ask() for _ in range(number)]
        wait_for(lambda: self.rank.num_waiting == number, "engines wait")
        return asking

    def give(self, wait_seconds: float = 0.0) -> int:
        return self.rank.give(self._gather(), wait_seconds, lambda: self.events.append("released"))

    def _gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from TENSORS.items()
        self.streams += 1  # the collective has ended


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.rank.allow("g:1")
    yield world
    world.rank.close()
    world.threads.shutdown()


def assert_complete(found: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor), name


def test_all_engines_that_wait_get_all_tensors_in_memory_of_their_own(world: World) -> None:
    asking, descriptors = world.ask_and_wait(2), len(os.listdir("/proc/self/fd"))
    assert world.give() == 2
    for each in asking:
        assert_complete(each.result(10))
    assert asking[0].result()["norm"].data_ptr() != asking[1].result()["norm"].data_ptr()
    wait_for(lambda: len(os.listdir("/proc/self/fd")) < descriptors, "the sockets and the shared memory are closed")
    assert world.rank.num_waiting == 0


def test_engines_end_only_after_the_rank_has_freed_what_the_gathering_left(world: World) -> None:
    (asking,) = world.ask_and_wait()
    ended: list[bool] = []
    world.rank.give(TENSORS.items(), 0.0, lambda: ended.append(asking.done()))
    assert_complete(asking.result(10))
    assert ended == [False], "an engine would allocate its cache before"


def test_the_first_hand_over_waits_for_its_engine(world: World) -> None:
    giving = world.threads.submit(world.give, 10.0)
    assert_complete(world.ask().result(10))
    assert giving.result(10) == 1


def test_without_an_engine_the_rank_still_takes_part_in_the_gathering(world: World) -> None:
    assert world.give() == 0
    assert (world.streams, world.events) == (1, ["released"])


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda world: world.ask(key="g:0"), "it offers g:1"),
        (lambda world: world.ask(token="wrong"), "the other side has ended"),
    ],
)
def test_engines_without_the_version_or_the_token_get_nothing(
    world: World, ask: Callable[[World], Future[dict[str, torch.Tensor]]], reason: str
) -> None:
    with pytest.raises(TransientError, match=f"hands over no weights g:.*{reason}"):
        ask(world).result(10)
    assert world.rank.num_waiting == 0


def test_an_engine_that_waits_is_refused_when_the_turn_changes(world: World) -> None:
    (asking,) = world.ask_and_wait()
    world.rank.allow("")
    with pytest.raises(TransientError, match="the other side has ended"):
        asking.result(10)
    with pytest.raises(TransientError, match="it is the trainer's turn"):
        world.ask().result(10)


def test_an_engine_that_ends_while_it_waits_is_forgotten(world: World) -> None:
    channel = Channel.connect(socket_path(world.folder, CPU), 1.0)
    channel.send({"token": "secret", "key": "g:1"})
    wait_for(lambda: world.rank.num_waiting == 1, "it waits")
    channel.close()
    wait_for(lambda: world.rank.num_waiting == 0, "it is forgotten")


def test_an_engine_that_ends_in_the_hand_over_is_dropped_and_the_others_get_all(world: World) -> None:
    channel = Channel.connect(socket_path(world.folder, CPU), 1.0)
    channel.send({"token": "secret", "key": "g:1"})
    wait_for(lambda: world.rank.num_waiting == 1, "it waits")
    asking = world.ask()
    wait_for(lambda: world.rank.num_waiting == 2, "both wait")
    giving = world.threads.submit(world.give)
    channel.receive(10)
    channel.send({})
    channel.receive(10)  # the first bucket, which it never has copied
    channel.close()
    assert giving.result(10) == 1
    assert_complete(asking.result(10))
    assert (world.streams, world.events) == (1, ["released"])


def test_an_engine_that_does_not_answer_in_time_is_dropped(world: World) -> None:
    world.rank.answer_seconds = 0.05
    with contextlib.closing(Channel.connect(socket_path(world.folder, CPU), 1.0)) as channel:
        channel.send({"token": "secret", "key": "g:1"})
        wait_for(lambda: world.rank.num_waiting == 1, "it waits")
        assert world.give() == 0
    assert world.streams == 1, "the other ranks must not wait for this one"


def test_a_gathering_that_fails_ends_the_loads_and_frees_the_memory(world: World) -> None:
    def fail() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embedding", TENSORS["embedding"]
        raise RuntimeError("a peer has died")

    (asking,) = world.ask_and_wait()
    with pytest.raises(RuntimeError, match="a peer has died"):
        world.rank.give(fail(), 0.0, lambda: None)
    with pytest.raises(TransientError, match="the other side has ended"):
        asking.result(10)


def test_a_load_that_fails_closes_the_engines_side(world: World) -> None:
    def load() -> None:
        for _ in receive_tensors(world.folder, "secret", "g:1", CPU):
            raise ValueError("no such parameter")

    loading = world.threads.submit(load)
    wait_for(lambda: world.rank.num_waiting == 1, "it waits")
    assert world.give() == 0
    with pytest.raises(ValueError, match="no such parameter"):
        loading.result(10)
    assert world.streams == 1


def test_a_rank_takes_the_place_of_one_that_was_killed(world: World) -> None:
    world.rank.close()
    socket_path(world.folder, CPU).touch()
    second = HandOver(world.folder, "secret", CPU, BUCKET_BYTES)
    second.allow("h:0")
    asking = world.ask(key="h:0")
    assert second.give(TENSORS.items(), 10.0, lambda: None) == 1
    assert_complete(asking.result(10))
    second.close()
    assert not socket_path(world.folder, CPU).exists()
    with pytest.raises(TransientError, match="No such file"):
        world.ask(key="h:0").result(10)
    wait_for(lambda: not any(t.name == "hand-over" for t in threading.enumerate()), "the listeners have ended")
