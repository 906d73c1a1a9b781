"""Program of test_device_state: `main(FOLDER)` trains with and without changes of turns, on one FSDP2 rank and on
three, whose shards have padding.

On CPUs nothing has to move. `moved` lets DeviceState move everything to other memory of the host, with the same code.
Writes FOLDER/KIND-TURNS-RANKS.pt for the test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from rljob_trainer.policy import checkpoints
from rljob_trainer.policy.checkpoints import CheckpointSaver
from rljob_trainer.policy.host_copy import DeviceState
from rljob_trainer.policy.policy import Policy
from tests.support.checkpoint_scenarios import KINDS, full_state
from tests.support.critic_scenarios import build_rows
from tests.support.policy_scenarios import Scenarios, build_inputs, clone
from tests.support.rank_programs import fork, fork_ranks

CASES = {1: ("policy", "lora-and-critic"), 3: ("policy",)}
"""Kinds by the number of ranks."""


class TurnScenarios(Scenarios):
    def run(self) -> None:
        for kind in CASES[self.num_ranks]:
            self.train(kind)

    def train(self, kind: str) -> None:
        for turns in ("none", "moved"):
            is_moved = mock.patch.object(DeviceState, "_is_on_device", staticmethod(lambda tensor: turns == "moved"))  # noqa: B023
            with is_moved:
                contents = self.run_steps(kind, f"{kind}-{turns}", has_turns=turns != "none")
            if self.rank == 0:
                torch.save(contents, self.folder / f"{kind}-{turns}-{self.num_ranks}.pt")

    def run_steps(self, kind: str, name: str, *, has_turns: bool) -> dict[str, Any]:
        algorithm, settings = KINDS[kind]
        folder = self.folder / f"checkpoint-{name}-{self.num_ranks}"

        def give(change: Callable[[Policy], None]) -> None:
            if has_turns:
                change(policy)
                change(policy)  # the second time does nothing

        policy = self.policy(algorithm, **settings)
        saver = CheckpointSaver(policy, asynchronous=True)
        give(Policy.free)  # before the first forward pass
        give(Policy.restore)
        self.update(policy, build_rows(1))
        published = [clone(dict(policy.stream_published().tensors))]
        give(Policy.free)
        buffers = [find_memory(policy)]
        checkpoints.save_checkpoint(policy, folder / "waited")
        saver.begin(folder / "copied")
        checkpoints.export_model(policy, self.folder / f"export-{name}-{self.num_ranks}", str(self.folder / "model"))
        published.append(clone(dict(policy.stream_published().tensors)))
        give(Policy.restore)
        metrics = self.update(policy, build_rows(2))
        saver.wait()
        published.append(clone(dict(policy.stream_published().tensors)))
        trained = find_memory(policy)
        give(Policy.free)
        buffers.append(find_memory(policy))
        contents = {"metrics": metrics, "published": published, "state": full_state(policy)}
        contents |= {"trained": trained, "buffers": buffers}
        give(Policy.restore)
        for part in ("waited", "copied") if has_turns else ():
            resumed = self.policy(algorithm, **settings)
            checkpoints.load_checkpoint(resumed, folder / part)
            self.update(resumed, build_rows(2))
            contents[part] = full_state(resumed)
        return contents


def find_memory(policy: Policy) -> list[int]:
    """Return where the shards of the policy's trained parameters and their moments are."""
    policy.reshard()
    held = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    held += [value for state in policy.optimizer.state.values() for value in state.values() if value.dim()]
    return [each.to_local().untyped_storage().data_ptr() for each in held if isinstance(each, DTensor)]


def main(folder: Path) -> None:
    fork(build_inputs, folder)
    for number in CASES:
        fork_ranks(folder, number, TurnScenarios)
