"""Updates are the same on one rank, on four that share a copy of the model, and on two copies of two ranks each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import mesh_scenarios
from tests.support.rank_programs import run_forked

Outcome = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_forked(mesh_scenarios.__name__, tmp_path_factory.mktemp("meshes"))


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (ours[key] - tensor).abs().max() < tolerance, key


def assert_same_update(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Adam divides by the gradient's size, so rounding of a gradient near 0 can reverse its step."""
    assert ours.keys() == theirs.keys()
    num_wrong = sum(int(((ours[key] - theirs[key]).abs() > 1e-5).sum()) for key in theirs)
    assert num_wrong <= 1e-3 * sum(tensor.numel() for tensor in theirs.values())


@pytest.mark.parametrize(
    ("name", "layout"),
    [("plain", "full"), ("plain", "perReplica"), ("reduced", "perReplica"), ("everything", "perReplica")],
)
def test_gradients_norm_and_updates_do_not_depend_on_the_mesh(name, layout, outcome: Outcome):
    one, ours = outcome(name, "one"), outcome(name, layout)
    for mine, theirs in zip(ours["metrics"], one["metrics"], strict=True):
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4) != 0
        assert mine.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert mine.num_tokens == theirs.num_tokens
    assert_close(ours["gradients"], one["gradients"], 1e-5)
    assert_same_update(ours["parameters"], one["parameters"])


def test_adapters_and_critic_do_not_depend_on_the_mesh(outcome: Outcome):
    adapters = [outcome("adapters", each) for each in ("one", "perReplica")]
    assert adapters[1]["metrics"].grad_norm == pytest.approx(adapters[0]["metrics"].grad_norm, rel=1e-4)
    assert_close(adapters[1]["gradients"], adapters[0]["gradients"], 1e-5)
    assert_same_update(adapters[1]["weights"], adapters[0]["weights"])
    critics = [outcome("critic", each) for each in ("one", "perReplica")]
    assert critics[1]["metrics"].critic_loss == pytest.approx(critics[0]["metrics"].critic_loss, rel=1e-4)
    assert_same_update(critics[1]["parameters"], critics[0]["parameters"])


def test_adjacent_ranks_share_a_copy_and_copies_are_equal_bit_for_bit(outcome: Outcome):
    found = outcome("shards", "perReplica")
    first, second, third, fourth = found["shards"]
    assert torch.equal(torch.cat([first, second]), found["whole"])
    assert torch.equal(first, third)
    assert torch.equal(second, fourth)
    assert len(outcome("shards", "full")["shards"][0]) == len(found["whole"]) // 4
