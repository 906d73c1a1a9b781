"""Program of test_exports and test_exports_real: `main(FOLDER)`.

Trains one step of a model with experts, and of adapters, with one FSDP2 rank and two, and exports them: to
FOLDER/experts-export-RANKS and FOLDER/adapters-export-RANKS, and their checkpoints to the folders of runs,
FOLDER/experts-run-RANKS and FOLDER/adapters-run-RANKS. After another step, exports that checkpoint to
FOLDER/experts-earlier-export-RANKS and FOLDER/adapters-earlier-export-RANKS. Writes FOLDER/NAME-RANKS.pt for the test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rljob_api.run.folder import FILE_JOB, checkpoint_folder
from rljob_core.children.common import to_yaml
from rljob_trainer.history.run_state import FILE_DRIVER, write_complete
from rljob_trainer.policy import checkpoints
from rljob_trainer.policy.policy import Policy
from rljob_trainer.run_folder.file_facts import describe_file
from tests.support.lora_scenarios import LORA, initial_adapter
from tests.support.policy_scenarios import (
    PLAIN,
    VOCABULARY,
    Scenarios,
    build_rows,
    build_tokenizer,
    clone,
)
from tests.support.rank_programs import run_on_ranks


def build_experts(folder: Path) -> None:
    """Write a model whose routers have a bias that is a buffer."""
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, n_routed_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.1, first_k_dense_replace=0,
    )  # fmt: skip
    model = Glm4MoeForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp.gate.e_score_correction_bias.uniform_(-0.1, 0.1)
    model.save_pretrained(folder)


def build_dense(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def build_inputs(_: int, folder: Path) -> None:
    for name, build in (("experts", build_experts), ("adapters", build_dense)):
        build(folder / name / "model")
        build_tokenizer(folder / name / "model")


class ExportScenarios(Scenarios):
    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        super().__init__(rank, num_ranks, folder)
        self.root = folder

    def run(self) -> None:
        self.train_and_export("experts")
        self.train_and_export("adapters", lora=LORA)

    def train_and_export(self, name: str, **trainer: Any) -> None:
        self.folder = self.root / name
        policy = self.policy(PLAIN, **trainer)
        if policy.adapters is not None:
            _randomize(policy)
        before = clone(policy.gather_weights())
        metrics = self.update(policy, build_rows())
        weights, published = clone(policy.gather_weights()), clone(dict(policy.stream_published().tensors))
        export = self.root / f"{name}-export-{self.num_ranks}"
        checkpoints.export_model(policy, export, str(self.folder / "model"))
        run = self.root / f"{name}-run-{self.num_ranks}"
        self.save_run(policy, run)
        self.update(policy, build_rows(2))
        checkpoints.load_weights(policy, checkpoint_folder(run, 1))  # as for the best step, after the last one
        earlier = self.root / f"{name}-earlier-export-{self.num_ranks}"
        checkpoints.export_model(policy, earlier, str(self.folder / "model"))
        self.folder = self.root
        self.write(name, before=before, weights=weights, published=published, metrics=metrics)

    def save_run(self, policy: Policy, run: Path) -> None:
        """Write the folder of a run with the checkpoint of step 1."""
        folder = checkpoint_folder(run, 1)
        written: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(written, checkpoints.save_checkpoint(policy, folder))
        if self.rank == 0:
            files = {f"{checkpoints.TRAINER_FOLDER}/{name}": facts for each in written for name, facts in each.items()}
            (folder / FILE_DRIVER).write_text("{}")
            write_complete(folder, {FILE_DRIVER: describe_file(folder, FILE_DRIVER), **files})
            job = policy._job.model_dump(mode="json", by_alias=True, exclude={"status"})
            job["spec"]["model"]["source"] = policy.source
            (run / FILE_JOB).write_text(to_yaml(job))
        dist.barrier()


def _randomize(policy: Policy) -> None:
    assert policy.adapters is not None
    for name, shard in policy.adapters._shards.items():
        value = initial_adapter(name, tuple(shard.shape))
        shard.data.copy_(distribute_tensor(value, shard.device_mesh, shard.placements))


def main(folder: Path) -> None:
    run_on_ranks(folder, build_inputs, ExportScenarios)
