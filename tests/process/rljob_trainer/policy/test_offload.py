"""trainer.offload changes where shards are, and nothing else: on CPUs bit for bit, on an accelerator by devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_plan import accelerator

from tests.support import accelerator_offload, offload_scenarios
from tests.support.rank_programs import run_forked

Outcome = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_forked(offload_scenarios.__name__, tmp_path_factory.mktemp("offload"))


@pytest.mark.parametrize("offload", ["reference", "all"])
@pytest.mark.parametrize("kind", ["policy", "policy-reduced", "lora-and-critic"])
def test_updates_checkpoints_and_published_weights_are_the_same_bit_for_bit(kind, offload, outcome: Outcome):
    ours, plain = outcome(kind, offload), outcome(kind, "none")
    assert ours["metrics"].grad_norm == plain["metrics"].grad_norm != 0
    for name in ("before", "published"):
        assert_equal(ours[name], plain[name])
    assert_equal(ours["state"], plain["state"])


@pytest.mark.parametrize("offload", offload_scenarios.VALUES)
@pytest.mark.parametrize("kind", ["policy", "lora-and-critic"])
def test_run_resumes_with_the_same_offload_and_with_another_one(kind, offload, outcome: Outcome):
    ours, plain = outcome(kind, offload), outcome(kind, "none")
    for name in offload_scenarios.RESUMED[offload]:
        assert_equal(ours[name], plain["state"])


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys() != set()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key


@pytest.mark.parametrize(
    ("kind", "offload", "expected"),
    [
        ("policy", "none", set()),
        ("policy", "reference", {"reference"}),
        ("policy", "all", {"policy", "reference"}),
        ("lora-and-critic", "reference", set()),
        ("lora-and-critic", "all", {"policy", "critic"}),
    ],
)
def test_the_models_of_the_chosen_value_are_offloaded(kind, offload, expected, outcome: Outcome):
    assert outcome(kind, offload)["offloaded"] == expected


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """What is on which device after an update on an accelerator of fake tensors, by the value of trainer.offload."""
    folder = run_forked(accelerator_offload.__name__, tmp_path_factory.mktemp("devices"))
    found: dict[str, dict[str, list[str]]] = json.loads((folder / "devices.json").read_text())
    return found


@pytest.mark.parametrize(("offload", "state", "reference"), [
    ("none", "fakegpu", "fakegpu"), ("reference", "fakegpu", "cpu"), ("all", "cpu", "cpu"),
])  # fmt: skip
def test_an_accelerator_computes_what_is_in_host_memory(offload, state, reference, devices):
    found = devices[offload]
    for model in ("policy", "critic"):
        for name in (model, f"{model} gradients", f"{model} moments"):
            assert found[name] == [state], name
    assert found["reference"] == [reference]
    for name in ("buffers", "published", "summed norm", "freed published"):
        assert found[name] == [accelerator.NAME], name


@pytest.mark.parametrize("offload", offload_scenarios.VALUES)
def test_free_moves_everything_to_host_memory_and_restore_undoes_it(offload, devices):
    found = devices[offload]
    for model in ("policy", "critic", "reference"):
        assert found[f"freed {model}"] == ["cpu"]
        assert found[f"restored {model}"] == found[model]
    for model in ("policy", "critic"):
        assert found[f"freed {model} gradients"] == []
        assert found[f"freed {model} moments"] == ["cpu"]
        for part in ("gradients", "moments"):
            assert found[f"restored {model} {part}"] == found[f"{model} {part}"]
