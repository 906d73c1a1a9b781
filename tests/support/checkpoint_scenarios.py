"""Program of test_checkpoints: `main(FOLDER)` saves checkpoints on FSDP2 ranks.

Each of NUM_RANKS resumes from the checkpoint of the one before. Writes FOLDER/NAME.pt for
the test.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401 - before the fork

from rljob_api.manifest.algorithm import Algorithm
from rljob_trainer.policy import checkpoints
from rljob_trainer.policy.checkpoint_storage import CheckpointWriter
from rljob_trainer.policy.checkpoints import CheckpointSaver
from rljob_trainer.policy.policy import Policy
from rljob_trainer.run_folder.client import RemoteFolder
from rljob_trainer.run_folder.file_facts import Checkpoint, DamagedCheckpointError, FileFacts
from tests.support.critic_scenarios import PPO, build_rows
from tests.support.policy_scenarios import EVERYTHING, HEAD_TOKEN, Scenarios, build_inputs, clone
from tests.support.rank_programs import fork, fork_ranks
from tests.support.waiting import DEADLINE_SECONDS

NUM_RANKS = (1, 2, 4, 1)
KINDS: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "policy": (EVERYTHING, {}),
    "lora-and-critic": (PPO, {"lora": {"rank": 4, "dropout": 0.2}}),
}


class GatedWriter(CheckpointWriter):
    """Writes once the gate is open, and then fails if it should."""

    gate: threading.Event
    failure: OSError | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        if not self.gate.wait(DEADLINE_SECONDS):  # the training of this rank has failed
            raise TimeoutError
        if self.failure is not None:
            raise self.failure
        return super().write_data(plan, planner)


class CheckpointScenarios(Scenarios):
    """The scenarios of meshes of as many ranks."""

    def __init__(self, rank: int, num_ranks: int, folder: Path, *numbers: int) -> None:
        super().__init__(rank, num_ranks, folder)
        self.numbers = numbers

    def run(self) -> None:
        for number in self.numbers:
            self.run_mesh(number)

    def run_mesh(self, number: int) -> None:
        self.number = number
        for kind in KINDS:
            self.hop(kind)
        if self.number == 1:
            for kind in KINDS:
                self.save_while_training(kind)
            self.fail()
            self.damage("here", self.folder / "damaged", self.folder / "damaged")
            on_head = RemoteFolder((self.folder / "url").read_text(), "checkpoints/step-000099", HEAD_TOKEN)
            self.damage("on-the-head", on_head, self.folder / "head" / "checkpoints" / "step-000099")

    def new(self, kind: str) -> Policy:
        algorithm, settings = KINDS[kind]
        return self.policy(algorithm, **settings)

    def train(self, policy: Policy, seed: int) -> None:
        self.update(policy, build_rows(seed))

    def hop(self, kind: str) -> None:
        """Resume from the checkpoint of the ranks before, through the head every second time, and save another one."""
        policy, before = self.new(kind), self.number - 1
        if before < 0:
            self.train(policy, 1)
        else:
            checkpoints.load_checkpoint(policy, self.folder_of(kind, before))
        held = full_state(policy)
        checkpoints.save_checkpoint(policy, self.folder_of(kind, self.number))
        self.train(policy, 2)
        self.write(f"{kind}-{self.number}", held=held, num_updates=policy.num_updates, trained=policy.gather_weights())

    def folder_of(self, kind: str, number: int) -> Path | RemoteFolder:
        if number % 2:
            return RemoteFolder(
                (self.folder / "url").read_text(), f"checkpoints/step-{number:06d}/trainer/{kind}", HEAD_TOKEN
            )
        return self.folder / f"{kind}-{number}"

    def save_while_training(self, kind: str) -> None:
        """Train on while a checkpoint is held back, publish too, and resume from it. Do it twice: the second copy goes
        where the first one was."""
        policy = self.new(kind)
        saver = CheckpointSaver(policy, asynchronous=True)
        self.train(policy, 1)
        for step in (2, 3):
            name, gate = f"{kind}-held-{step}", threading.Event()
            with mock.patch.object(checkpoints, "CheckpointWriter", build_gated(gate)):
                saver.begin(self.folder / f"checkpoint-{name}")
            self.train(policy, step)
            policy.gather_weights()
            drawn = torch.rand(3)
            is_written = (self.folder / f"checkpoint-{name}" / "trainer" / ".metadata").exists()
            gate.set()
            saver.wait()
            resumed = self.new(kind)
            checkpoints.load_checkpoint(resumed, self.folder / f"checkpoint-{name}")
            self.train(resumed, step)
            resumed.gather_weights()
            self.write(
                name, uninterrupted=full_state(policy), resumed=full_state(resumed), is_written=is_written,
                same_draws=torch.equal(torch.rand(3), drawn),
            )  # fmt: skip

    def fail(self) -> None:
        """The disk of the last rank is full while the others write."""
        saver, gate, raised = CheckpointSaver(self.new("policy"), asynchronous=True), threading.Event(), []
        failure = OSError(errno.ENOSPC, "No space left on device") if self.rank == self.num_ranks - 1 else None
        with mock.patch.object(checkpoints, "CheckpointWriter", build_gated(gate, failure)):
            saver.begin(self.folder / "failed")
        gate.set()
        for _ in range(2):
            try:
                saver.wait()
            except OSError as error:
                raised.append(error.errno)
        self.write(
            "failed",
            raised=self.gather(raised),
            is_complete=(self.folder / "failed" / "trainer" / ".metadata").exists(),
        )

    def damage(self, name: str, folder: Path | RemoteFolder, stored: Path) -> None:
        """Flip a bit of the file of rank 1, in a tensor: torch alone would load it. `stored`: the files of `folder`."""
        saver = CheckpointSaver(self.new("policy"), asynchronous=name == "here")
        saver.begin(folder)
        written: dict[str, FileFacts] = {}
        for files in self.gather(saver.wait()):
            written |= {f"trainer/{each}": facts for each, facts in files.items()}
        checkpoint = Checkpoint(stored, written)
        intact = self.gather(self.find_damage(checkpoint, folder))
        if self.rank == 0:
            path = stored / "trainer" / "__1_0.distcp"
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        dist.barrier()
        checkpoints.load_checkpoint(self.new("policy"), folder)
        self.write(
            f"damage-{name}", written=written, intact=intact, found=self.gather(self.find_damage(checkpoint, folder))
        )

    def find_damage(self, checkpoint: Checkpoint, folder: Path | RemoteFolder) -> str:
        try:
            checkpoints.verify_checkpoint(checkpoint, folder, self.rank, self.num_ranks)
        except DamagedCheckpointError as error:
            return str(error)
        return ""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, value)
        return found

    def write(self, name: str, **contents: Any) -> None:
        if self.rank == 0:
            torch.save(contents, self.folder / f"{name}.pt")


def build_gated(gate: threading.Event, failure: OSError | None = None) -> Callable[[Path], GatedWriter]:
    def build(folder: Path) -> GatedWriter:
        writer = GatedWriter(folder)
        writer.gate, writer.failure = gate, failure
        return writer

    return build


def full_state(policy: Policy) -> dict[str, torch.Tensor]:
    """Return all trained parameters and their moments."""
    policy.reshard()
    found: dict[str, torch.Tensor] = {}
    for model, optimizer in [
        (policy.model, policy.optimizer),
        *([] if policy.critic is None else [(policy.critic.model, policy.critic.optimizer)]),
    ]:
        if policy.critic is not None:
            policy.critic.reshard()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                key = f"{type(model).__name__}.{name}"
                found[key] = full(parameter)
                found |= {f"{key}.{moment}": full(value) for moment, value in optimizer.state[parameter].items()}
    return clone(found)


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(folder: Path) -> None:
    fork(build_inputs, folder)
    for num_ranks, numbers in groupby(range(len(NUM_RANKS)), lambda number: NUM_RANKS[number]):
        fork_ranks(folder, num_ranks, CheckpointScenarios, *numbers)
