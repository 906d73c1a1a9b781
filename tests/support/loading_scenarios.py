"""Program of test_sharded_weights: `main(FOLDER)` opens models with one FSDP2 rank
and with two, and compares them with what transformers' from_pretrained loads.

Writes FOLDER/NAME-RANKS.pt for the test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rljob_api.errors import UserError
from rljob_api.manifest.algorithm import Critic as CriticSettings
from rljob_api.manifest.roles import Lora
from rljob_trainer.policy.critic import Critic
from rljob_trainer.policy.lora import Adapters
from rljob_trainer.policy.model_loading import OpenedModel, ScoringModel, open_network, shard
from rljob_trainer.policy.sharded_weights import Skeleton
from rljob_trainer.policy.sharding import ShardingMode
from tests.support.rank_programs import run_on_ranks

CPU = torch.device("cpu")
TOKENS = torch.arange(10)[None]
_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied-in-many-files": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen2-tied-with-a-copy": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False, "head_dim": 8}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_EXPERTS, "tie_word_embeddings": False}),
}
"""Vocabulary and experts do not divide by two. The files of an MoE have each expert alone, the network has all in one
parameter."""
WHOLE = ("bin", "differing-copies")
"""Models that no rank can read in slices."""
BROKEN = ("missing", "no-head", "renamed", "missing-in-bin", "mismatched")


def build_inputs(index: int, folder: Path) -> None:
    for number, (name, (config, sizes)) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**_SIZES, **sizes), dtype=torch.bfloat16)
        model.save_pretrained(folder / name, max_shard_size="20KB" if "many-files" in name else "1GB")
        if "copy" in name:
            add_copy(folder / name, factor=1)
    for name in (*WHOLE, *BROKEN):
        model.save_pretrained(folder / name)
    change(folder / "missing", lambda weights: weights.pop("model.norm.weight"))
    change(folder / "no-head", lambda weights: weights.pop("lm_head.weight"))
    change(
        folder / "renamed", lambda weights: [weights.update({f"_orig_mod.{k}": weights.pop(k)}) for k in list(weights)]
    )
    change(folder / "mismatched", lambda weights: weights.update({"model.norm.weight": torch.ones(7)}))
    change(folder / "missing-in-bin", lambda weights: weights.pop("model.norm.weight"))
    for name in ("bin", "missing-in-bin"):
        torch.save(load_file(folder / name / "model.safetensors"), folder / name / "pytorch_model.bin")
        (folder / name / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen2-tied-with-a-copy")
    model.save_pretrained(folder / "differing-copies")
    add_copy(folder / "differing-copies", factor=2)


def add_copy(folder: Path, factor: int) -> None:
    """Write the head of a tied model a second time, as some published models do."""
    change(folder, lambda weights: weights.update({"lm_head.weight": factor * weights["model.embed_tokens.weight"]}))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


class Scenarios:
    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        self.rank, self.num_ranks, self.folder = rank, num_ranks, folder
        self.mesh = init_device_mesh("cpu", (num_ranks,))

    def run(self) -> None:
        for name in MODELS:
            self.compare(name, torch.float32)
        self.compare("llama", torch.bfloat16)
        for name in WHOLE:
            self.compare(name, torch.float32)
        self.open_broken()
        self.open_for_adapters()
        self.open_for_critic()

    def open(self, name: str, dtype: torch.dtype = torch.float32) -> OpenedModel:
        return open_network(str(self.folder / name), dtype=dtype, attention="sdpa", options={"revision": "main"})

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder / name, dtype=dtype, attn_implementation="sdpa")

    def compare(self, name: str, dtype: torch.dtype) -> None:
        """Open, shard and fill the model, and find what differs from the model that transformers loads."""
        torch.manual_seed(0)
        with Reads() as reads:
            opened = self.open(name, dtype)
            opening = reads.take()
            model = shard(opened.network, mesh=self.mesh, dtype=dtype, keep_gathered=True)
            opened.fill(CPU)
        generator = torch.get_rng_state()
        torch.manual_seed(0)
        expected = self.load(name, dtype)
        network = opened.network
        ours = {key: parameter.full_tensor() for key, parameter in network.named_parameters()}
        theirs = dict(expected.named_parameters())
        held = sum(shard.to_local().numel() for shard in model.parameters() if isinstance(shard, DTensor))
        self.write(
            f"{name}-{dtype}".replace("torch.", ""),
            names=list(ours) == list(theirs),
            parameters=[key for key in theirs if not is_same(ours[key], theirs[key])],
            buffers=[key for key, found in pairs(network, expected, "named_buffers") if not is_same(*found)],
            config=network.config.to_dict() == expected.config.to_dict(),
            generation=network.generation_config.to_dict() == expected.generation_config.to_dict(),
            is_tied=network.get_output_embeddings().weight is network.get_input_embeddings().weight,
            is_tied_by_transformers=expected.get_output_embeddings().weight is expected.get_input_embeddings().weight,
            generator=torch.equal(generator, torch.get_rng_state()),
            opening=sum(opening.values()), filling=sum(reads.take().values()), held=held,
            logits=forward_sharded(model), expected_logits=expected(TOKENS).logits.detach(),
        )  # fmt: skip

    def open_broken(self) -> None:
        found: dict[str, str] = {}
        for name in BROKEN:
            try:
                self.open(name)
                found[name] = "loaded"
            except UserError as error:
                found[name] = str(error)
        self.write("broken", **found)

    def open_for_adapters(self) -> None:
        adapters = []
        for network in (self.open("llama", torch.bfloat16).network, self.load("llama", torch.bfloat16)):
            state = torch.get_rng_state()
            Adapters(network, Lora(rank=3), base="base", seed=5)
            assert torch.equal(state, torch.get_rng_state())
            adapters.append({key: p.detach() for key, p in network.named_parameters() if p.requires_grad})
            adapters.append({key for key, p in network.named_parameters() if p.is_meta})
        ours, on_meta, theirs, _ = adapters
        self.write("adapters", ours=ours, theirs=theirs, on_meta=on_meta)

    def open_for_critic(self) -> None:
        mode = ShardingMode(keep_gathered=True, reduce_once=True)
        with Reads() as reads:
            critic = Critic(
                self.open("llama"), CriticSettings(), mesh=self.mesh, mode=mode, dtype=torch.float32, device=CPU
            )
        expected = dict(self.load("llama").model.named_parameters())
        found = {key: tensor.full_tensor() for key, tensor in critic.model.network.named_parameters()}
        same = found.keys() == expected.keys() and all(is_same(found[key], expected[key]) for key in expected)
        self.write("critic", read=set(reads.take()), is_same=same)

    def write(self, name: str, **contents: Any) -> None:
        every: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(every, contents)
        if self.rank == 0:
            torch.save(every, self.folder / f"{name}-{self.num_ranks}.pt")


def is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def pairs(ours: Any, theirs: Any, kind: str) -> list[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    found, expected = (dict(getattr(network, kind)()) for network in (ours, theirs))
    assert found.keys() == expected.keys()
    return [(key, (found[key], expected[key])) for key in expected]


@torch.no_grad()
def forward_sharded(model: ScoringModel) -> torch.Tensor:
    """Return the logits of some tokens. FSDP gathers what the model's own forward uses."""
    with mock.patch.object(ScoringModel, "forward", lambda model, tokens: model.network(tokens).logits):
        return cast(torch.Tensor, model(TOKENS))


class Reads:
    """Counts the values that are read from files, by tensor."""

    def __enter__(self) -> Reads:
        self._counts: Counter[str] = Counter()
        original = Skeleton._slices

        def count(skeleton: Skeleton) -> Any:
            return _Counted(original(skeleton), self._counts)

        self._patch = mock.patch.object(Skeleton, "_slices", count)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    def take(self) -> Counter[str]:
        counts = Counter(self._counts)
        self._counts.clear()
        return counts


class _Counted:
    def __init__(self, opened: Any, counts: Counter[str]) -> None:
        self._opened, self._counts = opened, counts

    def __enter__(self) -> dict[str, _Slice]:
        return {name: _Slice(name, tensor, self._counts) for name, tensor in self._opened.__enter__().items()}

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)


class _Slice:
    def __init__(self, name: str, tensor: Any, counts: Counter[str]) -> None:
        self._name, self._tensor, self._counts = name, tensor, counts
        self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self._tensor[index]
        self._counts[self._name] += found.numel()
        return found


def main(folder: Path) -> None:
    run_on_ranks(folder, build_inputs, Scenarios)
