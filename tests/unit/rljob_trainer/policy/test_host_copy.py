"""The copy of a rank's state; tests/process/rljob_trainer/policy/test_checkpoints.py has it with shards."""

import os

import pytest
import torch

from rljob_trainer.policy.host_copy import HostCopy, pin_exact_sizes


def test_copy_stays_as_it_was_until_the_next_one():
    copy, weight = HostCopy(), torch.ones(3)
    state = {"model": {"a": weight}, "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a"]}], "num_updates": 1}
    first = copy.stage(state)
    assert first["groups"] == state["groups"]
    weight += 1
    state["num_updates"] = 2
    assert first["model"]["a"].tolist() == [1, 1, 1]
    assert first["num_updates"] == 1
    second = copy.stage(state)
    assert (second["model"]["a"].tolist(), second["num_updates"]) == ([2, 2, 2], 2)
    assert second["model"]["a"].data_ptr() == first["model"]["a"].data_ptr(), "the memory is used again"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_settings_of_the_allocator_stay(name, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    pin_exact_sizes()
    assert os.environ == {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1"}
    monkeypatch.setattr(os, "environ", {name: "mine"})
    pin_exact_sizes()
    assert os.environ == {name: "mine"}
