"""The compared shapes, as their config.json has them, and the settings of a trainer for each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from rljob_api.manifest.job import RLJob
from rljob_inputs.memory.limits import ShardingMode
from rljob_inputs.memory.shapes import read_shape
from rljob_inputs.memory.trainer import Recomputation, Work
from rljob_inputs.models.defaults import resolve_job

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768}
SMOLLM2_135M: dict[str, Any] = _LLAMA | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
QWEN25_1B5: dict[str, Any] = _QWEN2 | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN25_7B: dict[str, Any] = _QWEN2 | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN25_32B: dict[str, Any] = _QWEN2 | {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


@dataclass(frozen=True)
class Case:
    name: str
    config: dict[str, Any]
    num_ranks: int
    lines: int
    length: int
    mode: ShardingMode
    recomputation: Recomputation = "none"
    has_masks: bool = False
    lora_rank: int = 0
    on_gpu: bool = True
    attention: str = "sdpa"
    group: int = 1
    """Rows that share a prompt, with packed attention. The prompt is as long as each answer; together they are one of
    the `lines`."""
    has_reference: bool = False
    has_critic: bool = False
    offload: Literal["none", "reference", "all"] = "none"
    head_dtype: Literal["model", "float32"] = "model"

    @property
    def on_accelerator(self) -> bool:
        """Whether it needs the accelerator of fake tensors, in a process of its own."""
        return self.attention == "packed"

    def with_layers(self, count: int) -> Case:
        """Return the same case with fewer layers. Under the tracker, a layer takes seconds."""
        return replace(self, name=f"{self.name}, {count} layers", config=self.config | {"num_hidden_layers": count})

    def build_work(self) -> Work:
        """Return what the plan counts."""
        shape = read_shape(self.config)
        assert shape is not None
        return Work(
            shape=shape,
            num_shards=self.num_ranks,
            bytes_per_value=2,
            bytes_per_logit=2 if self.head_dtype == "model" else 4,
            limits_logits="final_logit_softcapping" in self.config,
            tokens=self.lines * self.length,
            line_tokens=self.length,
            on_gpu=self.on_gpu,
            mode=self.mode,
            recomputation=self.recomputation,
            attention=self.attention,
            has_masks=self.has_masks,
            key_copies=2 * self.group / (1 + self.group),
            adapter_parameters=shape.adapter_parameters(self.lora_rank, []) if self.lora_rank else 0,
            has_reference=self.has_reference,
            has_critic=self.has_critic,
            offloads_state=self.offload == "all",
            offloads_reference=self.offload != "none",
        )

    def build_job(self) -> RLJob:
        """Return a job with the same trainer."""
        trainer = {
            "gradientCheckpointing": self.recomputation,
            "attention": self.attention,
            "offload": self.offload,
            "headDtype": self.head_dtype,
        }
        if self.lora_rank:
            trainer["lora"] = {"rank": self.lora_rank}
        spec = {
            "model": {"source": "/model"},
            "data": {"train": {"source": "/data"}},
            "rewards": [{"name": "r", "http": {"url": "http://r"}}],
            "trainer": trainer,
            "algorithm": {
                "type": "ppo" if self.has_critic else "grpo",
                "kl": {"coefficient": 0.1 if self.has_reference else 0},
            },
        }
        manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "case"}, "spec": spec}
        return resolve_job(RLJob.model_validate(manifest), None)


_WHOLE = ShardingMode(keep_gathered=True, reduce_once=True)
_GATHERED = ShardingMode(keep_gathered=True, reduce_once=False)
_SHARDED = ShardingMode(keep_gathered=False, reduce_once=False)
_LIMITED = SMOLLM2_135M | {"final_logit_softcapping": 30.0}
CASES = (
    Case("0.135B on 4, 2k tokens", SMOLLM2_135M, 4, 4, 512, _WHOLE),
    Case("1.5B on 4, 16k tokens", QWEN25_1B5, 4, 8, 2048, _SHARDED),
    Case("1.5B on 4, 16k tokens, shared prompts", QWEN25_1B5, 4, 16, 1024, _SHARDED, has_masks=True),
    Case("7B on 4, 16k tokens, checkpointing", QWEN25_7B, 4, 8, 2048, _SHARDED, recomputation="full"),
    Case("7B on 4, 16k tokens", QWEN25_7B, 4, 8, 2048, _SHARDED),
    Case("1.5B on 4, 16k tokens, selective", QWEN25_1B5, 4, 8, 2048, _SHARDED, recomputation="selective"),
    Case("32B on 16, 16k tokens, checkpointing", QWEN25_32B, 16, 8, 2048, _SHARDED, recomputation="full"),
)
MORE_CASES = (
    Case("30B-A3B on 16, 16k tokens, checkpointing", QWEN3_30B_A3B, 16, 8, 2048, _SHARDED, "full"),
    Case("1.5B on 4, 16k tokens, gathered", QWEN25_1B5, 4, 8, 2048, _GATHERED, recomputation="full"),
    Case("0.135B on 1, 2k tokens, CPU", SMOLLM2_135M, 1, 4, 512, _WHOLE, on_gpu=False),
    Case("8 layers of 30B-A3B on 8, 8k tokens", QWEN3_30B_A3B | {"num_hidden_layers": 8}, 8, 4, 2048, _SHARDED),
    Case("0.135B on 4, 2k tokens, LoRA", SMOLLM2_135M, 4, 4, 512, _WHOLE, lora_rank=32),
    Case("0.135B on 4, 4k tokens, fp32 head", SMOLLM2_135M, 4, 8, 512, _WHOLE, head_dtype="float32"),
    Case("0.135B on 4, 1k tokens, fp32 head", SMOLLM2_135M, 4, 2, 512, _WHOLE, head_dtype="float32"),
    Case("0.135B on 4, 8k tokens, limited logits", _LIMITED, 4, 16, 512, _WHOLE),
    Case("0.135B on 4, 2k tokens, KL", SMOLLM2_135M, 4, 4, 512, _WHOLE, has_reference=True),
    Case("1.5B on 4, 16k tokens, KL", QWEN25_1B5, 4, 8, 2048, _SHARDED, has_reference=True),
    Case("0.135B on 4, 2k tokens, ppo", SMOLLM2_135M, 4, 4, 512, _WHOLE, has_critic=True),
    Case("1.5B on 4, 16k tokens, ppo", QWEN25_1B5, 4, 8, 2048, _SHARDED, has_critic=True),
)
ACCELERATOR_CASES = (
    Case("1.5B on 4, 16k tokens, packed", QWEN25_1B5, 4, 8, 2048, _SHARDED, attention="packed"),
    Case("1.5B on 4, 18k tokens, packed groups", QWEN25_1B5, 4, 2, 9216, _SHARDED, attention="packed", group=8),
    Case(
        "0.135B on 4, 2k tokens, KL, offload: reference",
        SMOLLM2_135M,
        4,
        4,
        512,
        _WHOLE,
        has_reference=True,
        offload="reference",
        attention="packed",
    ),
    Case(
        "0.135B on 4, 2k tokens, KL, ppo, offload: all",
        SMOLLM2_135M,
        4,
        4,
        512,
        _WHOLE,
        has_reference=True,
        has_critic=True,
        offload="all",
        attention="packed",
    ),
)
"""On an accelerator of fake tensors, each in a process: packed attention as GPUs have it, and offload."""
ALL_CASES = CASES + MORE_CASES + ACCELERATOR_CASES
_SHALLOW = {
    "0.135B on 4, 2k tokens": 6,
    "0.135B on 4, 2k tokens, LoRA": 12,  # what differs by a constant weighs more in fewer layers
    "0.135B on 4, 4k tokens, fp32 head": 6,
    "0.135B on 4, 8k tokens, limited logits": 6,
    "0.135B on 4, 2k tokens, KL, ppo, offload: all": 6,
}
SHALLOW_CASES = tuple(case.with_layers(_SHALLOW[case.name]) for case in ALL_CASES if case.name in _SHALLOW)
"""Cheap cases that together have every part."""
