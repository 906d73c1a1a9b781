"""Program of test_offload: `main(FOLDER)` runs updates with and without
trainer.offload on two FSDP2 ranks. On CPUs, FSDP2 takes the same path, with copies from host memory to itself.

Writes FOLDER/NAME-OFFLOAD.pt for the test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401 - before the fork

from rljob_trainer.policy import checkpoints, sharding
from rljob_trainer.policy.checkpoints import CheckpointSaver
from rljob_trainer.policy.policy import Policy
from tests.support.checkpoint_scenarios import KINDS, full_state
from tests.support.critic_scenarios import build_rows
from tests.support.policy_scenarios import Scenarios, build_inputs, clone
from tests.support.rank_programs import fork, fork_ranks

VALUES = ("none", "reference", "all")
RESUMED = {
    "none": {"copied": "all"},
    "reference": {"waited": "reference"},
    "all": {"waited": "all", "copied": "none"},
}
"""From which of its checkpoints a run is resumed, and with which offload."""
REDUCE_OFTEN = sharding.ShardingMode(keep_gathered=False, reduce_once=False)


class OffloadScenarios(Scenarios):
    def run(self) -> None:
        for self.offload in VALUES:
            for kind in KINDS:
                self.train(kind)
            with mock.patch.object(sharding, "choose_mode", return_value=REDUCE_OFTEN):
                self.train("policy", suffix="-reduced")

    def new(self, kind: str, offload: str) -> Policy:
        algorithm, settings = KINDS[kind]
        return self.policy(algorithm, offload=offload, **settings)

    def train(self, kind: str, suffix: str = "") -> None:
        """Train, save next to training, publish, and resume with and without offload, unless the run has a suffix."""
        torch.manual_seed(0)  # with dropout, all values draw the same
        folder = self.folder / f"checkpoint-{kind}-{self.offload}{suffix}"
        policy = self.new(kind, self.offload)
        saver = CheckpointSaver(policy, asynchronous=True)
        before = clone(policy.gather_weights())
        self.update(policy, build_rows(1))
        checkpoints.save_checkpoint(policy, folder / "waited")
        saver.begin(folder / "copied")
        metrics = self.update(policy, build_rows(2))
        saver.wait()
        contents: dict[str, Any] = {
            "before": before, "metrics": metrics, "state": full_state(policy),
            "published": clone(dict(policy.stream_published().tensors)), "offloaded": find_offloaded(policy),
        }  # fmt: skip
        for name, offload in RESUMED[self.offload].items() if not suffix else ():
            resumed = self.new(kind, offload)
            checkpoints.load_checkpoint(resumed, folder / name)
            self.update(resumed, build_rows(2))
            contents[name] = full_state(resumed)
        if self.rank == 0:
            torch.save(contents, self.folder / f"{kind}{suffix}-{self.offload}.pt")


def find_offloaded(policy: Policy) -> set[str]:
    """Return the models all of whose shards FSDP2 offloads."""
    models = {"policy": policy.model, "reference": policy.reference}
    if policy.critic is not None:
        models["critic"] = policy.critic.model
    found = set()
    for name, model in models.items():
        units = [each for each in model.modules() if isinstance(each, FSDPModule)] if model is not None else []
        groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
        if groups and all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups):
            found.add(name)
    return found


def main(folder: Path) -> None:
    fork(build_inputs, folder)
    fork_ranks(folder, 2, OffloadScenarios)
