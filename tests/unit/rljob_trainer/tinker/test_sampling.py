"""Which adapter the rollouts hold while requests run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinker.proto.response_conv import deserialize_sample_response

from rljob_api.manifest.roles import Sampling
from rljob_api.wire.weights import WeightManifest, slot_name
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.episodes.types import Completion
from rljob_trainer.tinker.sampling import Sampler
from rljob_trainer.tinker.wire import Asked, RefusedError


class Fleet:
    """A trainer group and a rollout client that know what is in each slot, and what each request ran on."""

    def __init__(self) -> None:
        self.published: list[Path | None] = []
        self.gone: set[Path | None] = set()
        """Adapters whose files are deleted."""
        self.slow: dict[Path | None, asyncio.Event] = {}
        """Adapters that rollouts load once it is set."""
        self.held: dict[str, tuple[Path | None, str]] = {}
        """Adapter and salt of each slot."""
        self.ran: list[tuple[int, Path | None]] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.seeds: list[int] = []
        self.scores: Any = np.array([-1.0], np.float32)

    async def call(self, _: Any, slots: int, slot: int, adapter: Path | None, *key: Any) -> list[Any]:
        assert 1 <= slot <= slots
        self.published.append(adapter)
        if adapter in self.gone:
            return [None, None]
        self.filled = slot_name(slot), adapter
        manifest = WeightManifest(generation=key[0], version=key[1], num_bytes=0, checksum="0", digest_unit="element")
        return [manifest, None]

    def require(self, manifest: WeightManifest) -> None: ...

    async def sync(self, manifest: WeightManifest) -> None:
        name, adapter = self.filled
        if adapter in self.slow:
            await self.slow[adapter].wait()
        self.held[name] = (adapter, manifest.key)

    async def complete(
        self, token_ids: list[int], sampling: Sampling, seed: int, extra: Any, adapter: Any
    ) -> Completion:
        self.seeds.append(seed)
        before = self._find(adapter)
        if gate := self.gates.get(token_ids[0]):
            await gate.wait()
        assert self._find(adapter) == before, "the adapter changed under a request"
        self.ran.append((token_ids[0], before))
        return Completion([9], [-1.0], [0], "", truncated=False)

    def _find(self, asked: Any) -> Path | None:
        held, salt = self.held[asked["model"]] if "model" in asked else (None, "g")
        assert asked["cache_salt"] == salt, "its cached prefixes may be those of another adapter"
        return held

    async def score(self, token_ids: list[int], top_k: int, adapter: Any) -> Any:
        self._find(adapter)
        assert top_k == 0
        return self.scores

    def sampler(self, num_slots: int = 2) -> Sampler:
        return Sampler(self, "g", self, StatusBoard(), num_slots)  # type: ignore[arg-type]


def ask(number: int, **changes: Any) -> Asked:
    fields: dict[str, Any] = {"token_ids": [number, 1], "num_samples": 1, "sampling": Sampling(max_tokens=1), "seed": 5}
    return Asked(**{**fields, "extra": {}, "prompt_logprobs": False, "num_likeliest": 0, "last_n": None, **changes})


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.fixture
def folders(tmp_path):
    return SimpleNamespace(a=tmp_path / "a", b=tmp_path / "b", c=tmp_path / "c")


async def test_the_model_itself_is_served_from_the_start_and_needs_no_slot(folders):
    fleet = Fleet()
    sampler = fleet.sampler(1)
    await sampler.start()
    await sampler.sample(folders.a, ask(0))
    await sampler.sample(None, ask(1))
    assert fleet.published == [None, folders.a]
    assert fleet.ran == [(0, folders.a), (1, None)]


async def test_requests_of_several_adapters_run_at_once_and_each_is_published_once(folders):
    fleet = Fleet()
    sampler = fleet.sampler()
    gates = [fleet.gates.setdefault(number, asyncio.Event()) for number in range(4)]
    wanted = [folders.a, folders.b, folders.a, None]
    tasks = [asyncio.create_task(sampler.sample(each, ask(number))) for number, each in enumerate(wanted)]
    while len(fleet.seeds) < 4:
        await settle()
    for gate in gates:
        gate.set()
    await asyncio.gather(*tasks)
    assert fleet.published == [folders.a, folders.b]
    assert sorted(fleet.ran) == list(enumerate(wanted))


async def test_a_slot_that_is_in_use_is_not_filled_anew(folders):
    fleet = Fleet()
    sampler, gate = fleet.sampler(), fleet.gates.setdefault(0, asyncio.Event())
    first = asyncio.create_task(sampler.sample(folders.a, ask(0)))
    while not fleet.seeds:
        await settle()
    await sampler.sample(folders.b, ask(1))
    await sampler.sample(folders.c, ask(2))
    assert fleet.published == [folders.a, folders.b, folders.c], "a was in use for longest, and still is"
    second = fleet.gates.setdefault(3, asyncio.Event())
    third = asyncio.create_task(sampler.sample(folders.c, ask(3)))
    while len(fleet.seeds) < 4:
        await settle()
    fourth = asyncio.create_task(sampler.sample(folders.b, ask(4)))
    fifth = asyncio.create_task(sampler.sample(folders.a, ask(5)))
    await settle()
    assert len(fleet.published) == 3, "all slots are in use"
    gate.set()
    second.set()
    await asyncio.gather(first, third, fourth, fifth)
    assert [number for number, _ in fleet.ran[-2:]] == [4, 5], "a later request of an adapter that is held went first"


async def test_a_request_ends_while_another_adapter_is_published(folders):
    fleet = Fleet()
    sampler, gate = fleet.sampler(), fleet.gates.setdefault(0, asyncio.Event())
    first = asyncio.create_task(sampler.sample(folders.a, ask(0)))
    while not fleet.seeds:
        await settle()
    loads = fleet.slow.setdefault(folders.b, asyncio.Event())
    second = asyncio.create_task(sampler.sample(folders.b, ask(1)))
    while len(fleet.published) < 2:
        await settle()
    gate.set()
    await settle()
    assert first.done()
    loads.set()
    await second


async def test_weights_that_are_gone_are_refused_and_others_go_on(folders):
    fleet = Fleet()
    sampler = fleet.sampler(1)
    await sampler.sample(folders.b, ask(1))
    fleet.gone.add(folders.a)
    with pytest.raises(RefusedError, match="the sampler's weights are no longer kept"):
        await sampler.sample(folders.a, ask(0))
    await sampler.sample(folders.b, ask(2))
    assert fleet.ran == [(1, folders.b), (2, folders.b)]


async def test_samples_of_a_request_have_seeds_of_their_own_and_the_prompt_its_log_probs():
    fleet = Fleet()
    answer = await fleet.sampler().sample(None, ask(0, num_samples=3, prompt_logprobs=True))
    response = deserialize_sample_response(answer)
    assert (len(response.sequences), response.prompt_logprobs) == (3, [None, -1.0])
    assert sorted(fleet.seeds) == [5, 6, 7]


async def test_log_probs_that_vllm_refuses_are_an_error_of_the_request():
    fleet = Fleet()
    fleet.scores = None
    with pytest.raises(BaseExceptionGroup) as caught:
        await fleet.sampler().sample(None, ask(0, prompt_logprobs=True))
    assert isinstance(caught.value.exceptions[0], RefusedError)
