"""Program of test_lora: `main(FOLDER)` trains adapters with one FSDP2 rank and two.

Writes FOLDER/NAME-RANKS.pt for the test. B begins at random values, since the gradient of A is 0 where B is 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401 - before the fork

from rljob_api.manifest.algorithm import Algorithm
from rljob_trainer.policy import checkpoints, sharding
from rljob_trainer.policy.policy import Policy
from rljob_trainer.policy.sharding import ShardingMode
from tests.support.policy_scenarios import (
    EVERYTHING,
    FIRST,
    LATER,
    PLAIN,
    Scenarios,
    at_temperatures,
    build_inputs,
    build_rows,
    denominator,
)
from tests.support.rank_programs import run_on_ranks

LORA = {"rank": 4, "alpha": 6}
SCALE = 1.5
SMALLEST = ShardingMode(keep_gathered=False, reduce_once=False)
"""What large models use on GPUs."""


def initial_adapter(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The value from which the parameter is trained. `name`: in peft's files."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator) * 0.05


class LoraScenarios(Scenarios):
    def run(self) -> None:
        self.start()
        self.train_adapters("plain", PLAIN)
        self.train_adapters("accumulated", PLAIN, limit=16)
        self.train_adapters("recomputed", PLAIN, gradient_checkpointing="full")
        self.train_adapters("one-module", PLAIN, lora={**LORA, "targetModules": ["q_proj"]})
        self.train_adapters("everything", EVERYTHING, versions=LATER)
        with mock.patch.object(sharding, "choose_mode", return_value=SMALLEST):
            self.train_adapters("reduced", EVERYTHING, limit=24, versions=LATER)
        self.train_adapters("half", PLAIN, dtype="bfloat16")
        self.publish_adapters()
        self.save_adapters()

    def new(self, algorithm: Algorithm, **settings: Any) -> Policy:
        policy = self.policy(algorithm, **{"lora": LORA, **settings})
        assert policy.adapters is not None
        for name, shard in policy.adapters._shards.items():
            value = initial_adapter(name, tuple(shard.shape))
            shard.data.copy_(distribute_tensor(value, shard.device_mesh, shard.placements))
        return policy

    def start(self) -> None:
        policy = self.policy(PLAIN, lora=LORA)
        self.write("start", adapters=policy.adapters.gather(), weights=policy.gather_weights())

    def train_adapters(
        self, name: str, algorithm: Algorithm, *, limit: int = 4096, versions: Any = FIRST, **settings: Any
    ) -> None:
        policy, rows = self.new(algorithm, **settings), build_rows()
        rows = at_temperatures(rows) if algorithm is EVERYTHING else rows
        before = policy.gather_weights()  # before the first forward, one parameter after the other
        gradients: dict[str, torch.Tensor] = {}
        step = policy.optimizer.step

        def capture() -> None:
            for key, shard in policy.adapters._shards.items():
                gradients[key] = shard.grad.full_tensor().clone()
            step()

        policy.optimizer.step = capture  # type: ignore[method-assign]
        self.accumulate(policy, rows, versions, limit)
        metrics = self.apply(policy, denominator(rows))
        parameters = list(policy.model.named_parameters())
        self.write(
            name,
            before=before,
            gradients=gradients,
            metrics=metrics,
            adapters=policy.adapters.gather(),
            weights=policy.gather_weights(),
            frozen=[(p.dtype, p.grad) for _, p in parameters if not p.requires_grad],
            states=[(tuple(p.shape), p.dtype, state["exp_avg"].dtype) for p, state in policy.optimizer.state.items()],
            is_reference_copied=policy.reference is not None,
        )

    def publish_adapters(self) -> None:
        policy = self.new(EVERYTHING, lora={**LORA, "publish": "adapter"}, dtype="bfloat16")
        self.write("published", published=dict(policy.stream_published().tensors), adapters=policy.adapters.gather())

    def save_adapters(self) -> None:
        policy = self.new(EVERYTHING)
        self.update(policy, build_rows(1))
        checkpoints.save_checkpoint(policy, self.folder / f"checkpoint-{self.num_ranks}")
        checkpoints.export_model(policy, self.folder / f"export-{self.num_ranks}", str(self.folder / "model"))


def main(folder: Path) -> None:
    run_on_ranks(folder, build_inputs, LoraScenarios)
