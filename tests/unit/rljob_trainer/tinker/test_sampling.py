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
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.episodes.types import Completion
from rljob_trainer.tinker.sampling import Sampler
from rljob_trainer.tinker.wire import Asked, RefusedError


class Fleet:
    """A trainer group and a rollout client that know what is published, and what each request ran on."""

    def __init__(self) -> None:
        self.published: list[Path | None] = []
        self.gone: set[Path | None] = set()
        """Adapters whose files are deleted."""
        self.held: Path | None = None
        self.ran: list[tuple[int, Path | None]] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.seeds: list[int] = []
        self.scores: Any = np.array([-1.0], np.float32)

    async def call(self, function: Any, adapter: Path | None, generation: str, version: int) -> list[Any]:
        self.published.append(adapter)
        if adapter in self.gone:
            return [None, None]
        manifest = WeightManifest(
            generation=generation, version=version, num_bytes=0, checksum="0", digest_unit="element"
        )
        return [manifest, None]

    def require(self, manifest: WeightManifest) -> None: ...

    async def sync(self, manifest: WeightManifest) -> None:
        self.held = self.published[manifest.version]

    async def complete(self, token_ids: list[int], sampling: Sampling, seed: int, extra: Any) -> Completion:
        self.seeds.append(seed)
        before = self.held
        if gate := self.gates.get(token_ids[0]):
            await gate.wait()
        assert self.held == before, "the adapter changed under a request"
        self.ran.append((token_ids[0], self.held))
        return Completion([9], [-1.0], [0], "", truncated=False)

    async def score(self, token_ids: list[int]) -> Any:
        return self.scores

    def sampler(self) -> Sampler:
        return Sampler(self, "g", self, StatusBoard())  # type: ignore[arg-type]


def ask(number: int, **changes: Any) -> Asked:
    fields: dict[str, Any] = {"token_ids": [number, 1], "num_samples": 1, "sampling": Sampling(max_tokens=1), "seed": 5}
    return Asked(**{**fields, "extra": {}, "prompt_logprobs": False, "last_n": None, **changes})


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.fixture
def folders(tmp_path):
    found = SimpleNamespace(a=tmp_path / "a", b=tmp_path / "b")
    found.a.mkdir()
    found.b.mkdir()
    return found


async def test_an_adapter_is_published_once_for_requests_that_follow_each_other(folders):
    fleet = Fleet()
    sampler = fleet.sampler()
    await asyncio.gather(*(sampler.sample(folders.a, ask(number)) for number in range(3)))
    await sampler.sample(None, ask(3))
    assert fleet.published == [folders.a, None]
    assert sorted(fleet.ran) == [(0, folders.a), (1, folders.a), (2, folders.a), (3, None)]


async def test_an_adapter_is_replaced_only_when_no_request_uses_it(folders):
    fleet = Fleet()
    sampler, gate = fleet.sampler(), fleet.gates.setdefault(0, asyncio.Event())
    first = asyncio.create_task(sampler.sample(folders.a, ask(0)))
    while not fleet.seeds:
        await settle()
    second = asyncio.create_task(sampler.sample(folders.b, ask(1)))
    third = asyncio.create_task(sampler.sample(folders.a, ask(2)))
    await settle()
    assert fleet.published == [folders.a], "the second request did not wait"
    gate.set()
    await asyncio.gather(first, second, third)
    assert fleet.published == [folders.a, folders.b, folders.a]
    assert [number for number, _ in fleet.ran] == [0, 1, 2], "a later request of the same adapter went first"


async def test_weights_that_are_gone_are_refused_and_others_go_on(folders):
    fleet = Fleet()
    sampler = fleet.sampler()
    await sampler.sample(folders.b, ask(1))
    fleet.gone.add(folders.a)
    with pytest.raises(RefusedError, match="the sampler's weights are no longer kept"):
        await sampler.sample(folders.a, ask(0))
    await sampler.sample(folders.b, ask(2))
    assert fleet.ran == [(1, folders.b), (2, folders.b)]
    assert fleet.published == [folders.b, folders.a], "the rollouts hold what they did before"


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
