"""The copy of a rank's state; tests/process/rljob_trainer/policy/test_checkpoints.py has it with shards."""

import torch

from rljob_trainer.policy.host_copy import HostCopy


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
