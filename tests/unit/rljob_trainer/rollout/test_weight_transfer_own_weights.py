"""How deep an engine sleeps, and an engine that serves what it has loaded itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rljob_api.wire.weights import OWN_WEIGHTS, RolloutWeights, WeightManifest
from rljob_trainer.rollout.puller import ReplicaState, serve_own_weights
from rljob_trainer.rollout.weight_transfer import choose_level
from tests.support.waiting import DEADLINE_SECONDS


@pytest.mark.parametrize(
    ("settings", "level"),
    [({}, 2), ({"lora_config": "an adapter"}, 1), ({"speculative_config": "a draft"}, 1), ({"quantization": "fp8"}, 1)],
)
def test_weights_are_dropped_only_if_a_pull_replaces_all_of_them(settings: dict[str, str], level: int) -> None:
    vllm = {"lora_config": None, "speculative_config": None, "quantization": None, **settings}
    config = SimpleNamespace(**vllm, model_config=SimpleNamespace(quantization=vllm["quantization"]))
    assert choose_level(cast(Any, config)) == level


class Engine:
    """Answers as EngineLoader."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def warm_up(self) -> None:
        self.calls.append("warm up")

    async def adopt(self, manifest: WeightManifest) -> RolloutWeights:
        self.calls.append(f"label {manifest.key}")
        return RolloutWeights(generation=manifest.generation, version=manifest.version)


async def test_replica_of_a_job_without_a_trainer_is_ready_with_the_weights_of_its_files() -> None:
    engine, state = Engine(), ReplicaState()
    assert state.reason_not_ready()
    serving = asyncio.create_task(serve_own_weights(cast(Any, engine), state))
    await asyncio.wait_for(state.wait_until(lambda: not state.reason_not_ready()), DEADLINE_SECONDS)
    assert engine.calls == ["warm up", "label model:0"]
    assert (state.serving.key, state.must_load(), state.report("self")) == (OWN_WEIGHTS.key, False, None)
    assert not serving.done(), "the server ends with it"
    serving.cancel()
