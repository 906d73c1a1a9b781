"""Checkpoints of real FSDP2 ranks: on other numbers of ranks, through a folder and the head, and next to training.

checkpoint_scenarios.py runs each scenario; each test compares their results.
"""

from __future__ import annotations

import errno
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rljob_trainer.run_folder.file_facts import describe_file
from rljob_trainer.run_folder.server import RunFileServer
from tests.support import checkpoint_scenarios
from tests.support.checkpoint_scenarios import KINDS, NUM_RANKS
from tests.support.loopback import next_address
from tests.support.policy_scenarios import HEAD_TOKEN
from tests.support.rank_programs import run_forked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    (run := folder / "head").mkdir()
    server = RunFileServer(run, next_address(), HEAD_TOKEN)
    (folder / "url").write_text(server.folder.url)
    try:
        return run_forked(checkpoint_scenarios.__name__, folder)
    finally:
        server.close()


def read(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"{name}.pt", weights_only=False)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_has_the_same_bits_on_any_number_of_ranks(kind: str, folder: Path) -> None:
    outcomes = [read(folder, f"{kind}-{number}") for number in range(len(NUM_RANKS))]
    for before, after in pairwise(outcomes):
        assert_same(after["held"], before["held"])
        assert after["num_updates"] == 2, "the learning rate continues from there"
    assert any(name.endswith(".exp_avg_sq") and tensor.any() for name, tensor in outcomes[-1]["held"].items())


def test_update_after_a_checkpoint_of_other_ranks_differs_by_rounding_alone(folder: Path) -> None:
    """With LoRA's dropout, each rank draws other numbers."""
    outcomes = [read(folder, f"policy-{number}")["trained"] for number in range(len(NUM_RANKS))]
    for trained in outcomes[1:]:
        differences = torch.cat([(trained[name] - outcomes[0][name]).abs().flatten() for name in trained])
        # As in test_policy: Adam may turn the step of a gradient near 0.
        assert (differences > 1e-5).float().mean() <= 1e-3


HELD = [f"{kind}-held-{step}" for kind in KINDS for step in (2, 3)]


@pytest.mark.parametrize("name", HELD)
def test_checkpoint_that_is_written_during_training_has_the_state_at_its_beginning(name: str, folder: Path) -> None:
    outcome = read(folder, name)
    assert not outcome["is_written"], "it was held back until after the update"
    assert_same(outcome["resumed"], outcome["uninterrupted"])
    assert outcome["same_draws"], "random numbers continue, too"


def test_failure_of_one_rank_fails_the_checkpoint_on_all(folder: Path) -> None:
    outcome = read(folder, "failed")
    assert outcome["raised"] == [[errno.ENOSPC]] * 2, "once: the next one may be written"
    assert not outcome["is_complete"]


@pytest.mark.parametrize(("name", "stored"), [("here", "damaged"), ("on-the-head", "head/checkpoints/step-000099")])
def test_damage_that_torch_does_not_notice_is_found_by_the_rank_that_reads_the_file(
    name: str, stored: str, folder: Path
) -> None:
    outcome = read(folder, f"damage-{name}")
    names = {f"trainer/{path.name}" for path in (folder / stored / "trainer").iterdir()}
    assert (
        outcome["written"].keys()
        == names
        == {f"trainer/{each}" for each in ("__0_0.distcp", "__1_0.distcp", ".metadata")}
    )
    assert outcome["intact"] == ["", ""]
    first, second = outcome["found"]
    assert first == ""
    assert re.search(r"step-000099/trainer/__1_0.distcp on the head has|damaged/trainer/__1_0.distcp has", second), (
        second
    )
    intact = names - {"trainer/__1_0.distcp"}
    assert {each: describe_file(folder / stored, each) for each in intact} == {
        each: outcome["written"][each] for each in intact
    }
