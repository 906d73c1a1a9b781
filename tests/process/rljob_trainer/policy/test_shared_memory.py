"""FSDP2's collectives through shared memory give what gloo's give, and leave no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import shared_memory_scenarios
from tests.support.rank_programs import run_forked

RANKS = [(rank, num_ranks) for num_ranks in (2, 3) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_forked(shared_memory_scenarios.__name__, tmp_path_factory.mktemp("shared-memory"))


@pytest.fixture(params=RANKS, ids=lambda each: f"{each[0]}-of-{each[1]}")
def found(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    rank, num_ranks = request.param
    return torch.load(folder / f"{rank}-of-{num_ranks}.pt", weights_only=False)


def test_gathered_values_and_sums_are_those_of_gloo(found):
    assert found["wrong"] == []


def test_no_file_is_left_once_all_ranks_have_mapped_it(found):
    assert found["left"] == []


def test_ranks_that_do_not_see_the_same_memory_use_gloo(found):
    assert not found["unseen"]


def test_ranks_use_gloo_if_there_is_no_room(found):
    assert not found["full"]


def test_gradients_are_those_of_gloo(found):
    shared, plain = found["gradients"]
    for ours, theirs in zip(shared, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.abs().sum() > 0
