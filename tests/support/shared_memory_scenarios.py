"""Program of test_shared_memory: `main(FOLDER)` compares the collectives
through shared memory with gloo's, on two ranks and on three.

Writes FOLDER/RANK-of-RANKS.pt for the test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rljob_trainer.policy import shared_memory
from rljob_trainer.policy.shared_memory import SharedAllGather, SharedReduceScatter, Slots, use_shared_memory
from tests.support.rank_programs import fork_ranks

SLOT_BYTES = 48
"""A multiple of 4 bytes for each of 2 or 3 ranks."""
SIZES = (1, 6, 24, 25, 100)
"""Sizes of a rank's values: less than a slot, a whole one, and several."""
ROUNDS = 20


class SharedMemoryScenarios:
    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        self.rank, self.num_ranks, self.folder = rank, num_ranks, folder

    def run(self) -> None:
        found: dict[str, Any] = {"wrong": self.compare(), "left": self.left_files()}
        found["unseen"] = self.open_unseen()
        found["full"] = self.open_full()
        found["gradients"] = self.train(shared=True), self.train(shared=False)
        torch.save(found, self.folder / f"{self.rank}-of-{self.num_ranks}.pt")

    def compare(self) -> list[str]:
        """Return the collectives with another result than gloo's."""
        group, wrong = dist.group.WORLD, []
        assert group is not None
        slots = Slots.open(group, SLOT_BYTES)
        assert slots is not None
        torch.manual_seed(self.rank)
        for i in range(ROUNDS):
            for size in SIZES:
                for dtype in (torch.float32, torch.bfloat16):
                    own = torch.randn(size).to(dtype)
                    ours, theirs = (torch.zeros(size * self.num_ranks, dtype=dtype) for _ in range(2))
                    place = ours.narrow(0, size * self.rank, size).copy_(own)
                    SharedAllGather(slots)(ours, place if i % 2 else own, group)
                    dist.all_gather_single(theirs, own)
                    if not torch.equal(ours, theirs):
                        wrong.append(f"gather {size} {dtype}")
                values = torch.randint(-1000, 1000, (size * self.num_ranks,)).float()  # sums are exact in any order
                ours, theirs = torch.empty(size), torch.empty(size)
                SharedReduceScatter(slots)(ours, values, group, dist.ReduceOp.SUM)
                dist.reduce_scatter_single(theirs, values)
                if not torch.equal(ours, theirs):
                    wrong.append(f"reduce {size}")
        return wrong

    def left_files(self) -> list[str]:
        dist.barrier()
        left = [path.name for path in self.use_folder("mine").glob("*")]
        dist.barrier()  # rank 0 may create the next one
        return left

    def open_unseen(self) -> bool:
        """Return whether slots are opened although the last rank does not see the file."""
        sees = shared_memory._sees
        if self.rank == self.num_ranks - 1:
            shared_memory._sees = lambda path: False
        opened = Slots.open(dist.group.WORLD, SLOT_BYTES)
        shared_memory._sees = sees
        return opened is not None or self.left_files() != []

    def open_full(self) -> bool:
        return Slots.open(dist.group.WORLD, 1 << 50) is not None or self.left_files() != []

    def train(self, *, shared: bool) -> list[torch.Tensor]:
        """Return the gradients of a sharded model."""
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 3))
        mesh = init_device_mesh("cpu", (self.num_ranks,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in (model, model[0]):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        if shared:
            assert use_shared_memory(model, mesh)
        model(torch.full((4, 30), float(self.rank + 1))).sum().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    def use_folder(self, name: str) -> Path:
        folder = self.folder / f"{name}-{self.num_ranks}"
        folder.mkdir(exist_ok=True)
        return folder


class InOwnFolder(SharedMemoryScenarios):
    """Its files are in a folder of the test, which shows what is left."""

    def run(self) -> None:
        shared_memory._FOLDER = self.use_folder("mine")
        super().run()


def main(folder: Path) -> None:
    for num_ranks in (2, 3):
        fork_ranks(folder, num_ranks, InOwnFolder)
