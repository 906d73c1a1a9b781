"""Program of test_meshes: `main(FOLDER)` runs updates with one rank, with four that
share one copy of the model, and with two times two (trainer.sharding: perReplica).

Writes FOLDER/NAME-LAYOUT.pt for the test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401 - before the fork

from rljob_api.manifest.algorithm import Algorithm
from rljob_trainer.policy.policy import Policy
from rljob_trainer.policy.sharding import ShardingMode
from tests.support import critic_scenarios, lora_scenarios, policy_scenarios
from tests.support.policy_scenarios import EVERYTHING, LATER, PLAIN, build_inputs, build_rows
from tests.support.rank_programs import fork, fork_ranks

LAYOUTS = {1: ("one",), 4: ("full", "perReplica")}
"""Layouts by the number of their ranks."""
REDUCE_OFTEN = ShardingMode(keep_gathered=False, reduce_once=False)


class MeshScenarios(lora_scenarios.LoraScenarios):
    def __init__(self, rank: int, num_ranks: int, folder: Path, *layouts: str) -> None:
        super().__init__(rank, num_ranks, folder)
        self.layouts = layouts

    def run(self) -> None:
        for layout in self.layouts:
            self.run_layout(layout)

    def run_layout(self, layout: str) -> None:
        self.layout = layout
        self.train("plain", PLAIN)
        self.find_shards()
        if self.layout == "full":  # the rest is as with two ranks, which other programs test
            return
        self.train("reduced", PLAIN, micro_batch_tokens=16, mode=REDUCE_OFTEN, calls=2)
        self.train("everything", EVERYTHING, temperature=0.7, versions=LATER, level="sequence")
        self.train_adapters("adapters", PLAIN)
        self.train_critic()

    def policy(self, algorithm: Algorithm, *, temperature: float = 1.0, **trainer: Any) -> Policy:
        if self.layout == "perReplica":
            trainer = {"replicas": 2, "gpusPerReplica": 2, "sharding": "perReplica", **trainer}
        return super().policy(algorithm, temperature=temperature, **trainer)

    def train_critic(self) -> None:
        policy = self.policy(critic_scenarios.PPO)
        assert policy.critic is not None
        rows = critic_scenarios.build_rows(1)
        self.accumulate(policy, rows)
        metrics = self.apply(policy, policy_scenarios.denominator(rows))
        self.write("critic", metrics=metrics, parameters=critic_scenarios.full_parameters(policy.critic))

    def find_shards(self) -> None:
        """Write each rank's shard of one parameter after an update."""
        policy = self.policy(PLAIN)
        self.update(policy, build_rows())
        policy.reshard()
        parameter = dict(policy.model.named_parameters())["network.model.embed_tokens.weight"]
        assert isinstance(parameter, DTensor)
        every: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(every, parameter.to_local().detach().clone())
        self.write("shards", shards=every, whole=parameter.full_tensor().detach())

    def write(self, name: str, **contents: Any) -> None:
        if self.rank == 0:
            torch.save(contents, self.folder / f"{name}-{self.layout}.pt")


def main(folder: Path) -> None:
    fork(build_inputs, folder)
    for count, layouts in LAYOUTS.items():
        fork_ranks(folder, count, MeshScenarios, *layouts)
