"""How deep an engine sleeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rljob_trainer.rollout.own_weights import choose_level


@pytest.mark.parametrize(
    ("settings", "level"),
    [({}, 2), ({"lora_config": "an adapter"}, 1), ({"speculative_config": "a draft"}, 1), ({"quantization": "fp8"}, 1)],
)
def test_weights_are_dropped_only_if_a_pull_replaces_all_of_them(settings: dict[str, str], level: int) -> None:
    vllm = {"lora_config": None, "speculative_config": None, "quantization": None, **settings}
    config = SimpleNamespace(**vllm, model_config=SimpleNamespace(quantization=vllm["quantization"]))
    assert choose_level(cast(Any, config)) == level
