"""Changes of turns between updates change no bit of what is trained, saved, exported and published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import turn_scenarios
from tests.support.rank_programs import run_forked

CASES = [(kind, num_ranks) for num_ranks, kinds in turn_scenarios.CASES.items() for kind in kinds]
Outcome = Callable[[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_forked(turn_scenarios.__name__, tmp_path_factory.mktemp("turns"))


@pytest.mark.parametrize(("kind", "num_ranks"), CASES)
def test_all_is_the_same_bit_for_bit(kind, num_ranks, outcome: Outcome, folder: Path):
    ours, plain = outcome(f"{kind}-moved", num_ranks), outcome(f"{kind}-none", num_ranks)
    assert ours["metrics"].grad_norm == plain["metrics"].grad_norm != 0
    for mine, theirs in zip(ours["published"], plain["published"], strict=True):
        assert_equal(mine, theirs)
    for part in ("state", "waited", "copied"):
        assert_equal(ours[part], plain["state"])
    mine, theirs = (
        load_file(folder / f"export-{kind}-{name}-{num_ranks}" / "model.safetensors") for name in ("moved", "none")
    )
    assert_equal(mine, theirs)


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys() != set()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key


@pytest.mark.parametrize("kind", turn_scenarios.CASES[1])
def test_shards_leave_their_memory_for_buffers_that_are_used_again(kind, outcome: Outcome):
    found = outcome(f"{kind}-moved", 1)
    first, second = found["buffers"]
    assert first == second
    assert not set(first) & set(found["trained"])
