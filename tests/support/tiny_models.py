"""Tiny random models of the architectures that are held against transformers and vLLM.

Their sizes are the smallest that vLLM's CPU kernels take: heads of 32, of 128 in linear attention.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

_SCORES = re.compile(r"\.(q|k|qkv)_proj\.weight$")
"""Matrices from which attention scores come."""
TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 32}
WINDOW = {"sliding_window": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ONE_EXPERT = {"num_local_experts": 4, "num_experts_per_tok": 1}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT_ATTENTION = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
SHORT_CONVOLUTION = {
    "layer_types": ["conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "conv_dim": 128,
    "conv_dim_out": 128,
    "block_dim": 128,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 48}

IMAGE_TOKENS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
IMAGE_INDICES = {"image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502}
BLOCKS = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 128,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def mrope(*section: int, **others: Any) -> dict[str, Any]:
    """Rotary embeddings of positions in time, height and width, which are equal for texts."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **others}}


QWEN35_TEXT = {**TEXT, **HEADS, **DELTA_NET, **mrope(4, 2, 2, partial_rotary_factor=0.5, mrope_interleaved=True)}


@dataclass(frozen=True)
class TinyModel:
    config: dict[str, Any]
    """Arguments of the class of its configuration."""
    on_cpus: Literal["any", "bfloat16", "none"] = "any"
    """Data types in which vLLM computes it on CPUs as transformers does."""
    why: str = ""
    """Why not in all."""
    adapters: Literal["any", "gpu", "none"] = "any"
    """Where vLLM can add LoRA adapters."""


_NO_BIAS = "vLLM's router for CPUs ignores the correction bias of experts without groups"

MODELS: dict[str, TinyModel] = {
    # Dense
    "ApertusForCausalLM": TinyModel(TEXT, "bfloat16", "vLLM holds the parameters of its activation in bfloat16"),
    "ArceeForCausalLM": TinyModel(TEXT),
    # Without short windows: vLLM's have one token more than those of transformers.
    "Cohere2ForCausalLM": TinyModel({**TEXT, "logit_scale": 0.25}),
    "Ernie4_5ForCausalLM": TinyModel({**TEXT, **HEADS}),
    "Exaone4ForCausalLM": TinyModel({**TEXT, **HEADS, **WINDOW, "sliding_window_pattern": 4}),
    "Gemma2ForCausalLM": TinyModel({**TEXT, **HEADS, **WINDOW, "query_pre_attn_scalar": 32}),
    "Gemma3ForCausalLM": TinyModel({**TEXT, **HEADS, **WINDOW, "query_pre_attn_scalar": 32}),
    # vLLM has two modules where transformers has gate_up_proj.
    "Glm4ForCausalLM": TinyModel({**TEXT, **HEADS}, adapters="none"),
    "GraniteForCausalLM": TinyModel({**TEXT, "logits_scaling": 8.0, "embedding_multiplier": 12.0}),
    "HunYuanDenseV1ForCausalLM": TinyModel({**TEXT, **HEADS}),
    "LlamaForCausalLM": TinyModel(TEXT),
    "Ministral3ForCausalLM": TinyModel({**TEXT, **HEADS}),
    "MistralForCausalLM": TinyModel({**TEXT, **HEADS}),
    "NemotronForCausalLM": TinyModel({**TEXT, **HEADS}),
    "Olmo2ForCausalLM": TinyModel(TEXT),
    "Olmo3ForCausalLM": TinyModel({**TEXT, **WINDOW}),
    "Phi3ForCausalLM": TinyModel(TEXT),
    "Qwen2ForCausalLM": TinyModel(TEXT),
    "Qwen3ForCausalLM": TinyModel({**TEXT, **HEADS}),
    "SeedOssForCausalLM": TinyModel({**TEXT, **HEADS}),
    "SmolLM3ForCausalLM": TinyModel(TEXT),
    # Mixtures of experts
    "DeepseekV3ForCausalLM": TinyModel(
        {**TEXT, **ROUTED_EXPERTS, **LATENT_ATTENTION, "topk_method": "noaux_tc"},
        "none",
        "vLLM's latent attention differs on CPUs",
    ),
    "Dots1ForCausalLM": TinyModel({**TEXT, **HEADS, **ROUTED_EXPERTS}),
    "Ernie4_5_MoeForCausalLM": TinyModel(
        {
            **TEXT,
            **HEADS,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
        "none",
        _NO_BIAS,
    ),
    "Glm4MoeForCausalLM": TinyModel({**TEXT, **HEADS, **ROUTED_EXPERTS}),
    "GptOssForCausalLM": TinyModel({**TEXT, **HEADS, **LOCAL_EXPERTS, **WINDOW}),
    "GraniteMoeForCausalLM": TinyModel({**TEXT, **LOCAL_EXPERTS, "logits_scaling": 6.0}),
    "HunYuanMoEV1ForCausalLM": TinyModel({**TEXT, **HEADS, "num_experts": 4, "moe_topk": 2}),
    "Llama4ForCausalLM": TinyModel(
        {**TEXT, **HEADS, **ONE_EXPERT, "intermediate_size_mlp": 192, "num_hidden_layers": 4}
    ),
    "MiniMaxM2ForCausalLM": TinyModel(
        {
            **TEXT,
            **HEADS,
            **LOCAL_EXPERTS,
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "attn_type_list": [1, 1],
        },
        "none",
        _NO_BIAS,
    ),
    "MixtralForCausalLM": TinyModel({**TEXT, **LOCAL_EXPERTS}),
    "OlmoeForCausalLM": TinyModel({**TEXT, "num_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2MoeForCausalLM": TinyModel({**TEXT, **EXPERTS, **SHARED_EXPERT}),
    "Qwen3MoeForCausalLM": TinyModel({**TEXT, **HEADS, **EXPERTS}),
    # Layers with a state
    "FalconH1ForCausalLM": TinyModel(
        {**TEXT, **HEADS, **MAMBA, "mamba_d_ssm": 128, "mamba_n_heads": 4, "lm_head_multiplier": 0.5}
    ),
    "GraniteMoeHybridForCausalLM": TinyModel(
        {
            **TEXT,
            **MAMBA,
            "layer_types": ["mamba", "attention"],
            "mamba_expand": 2,
            "shared_intermediate_size": 192,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "logits_scaling": 8.0,
        }
    ),
    "Lfm2ForCausalLM": TinyModel({**TEXT, **SHORT_CONVOLUTION}, "none", "vLLM's short convolution differs on CPUs"),
    "NemotronHForCausalLM": TinyModel(
        {
            **TEXT,
            **HEADS,
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M-*M",
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
        }
    ),
    "Qwen3NextForCausalLM": TinyModel(
        {**TEXT, **HEADS, **EXPERTS, **DELTA_NET, **SHARED_EXPERT}, "bfloat16", "vLLM's linear attention for CPUs"
    ),
    "Qwen3_5ForCausalLM": TinyModel(QWEN35_TEXT, "bfloat16", "vLLM's linear attention for CPUs"),
    # Models that also read images, whose text towers train
    "Gemma3ForConditionalGeneration": TinyModel(
        {
            "text_config": {**TEXT, **HEADS, **WINDOW, "query_pre_attn_scalar": 32},
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            **IMAGE_INDICES,
        }
    ),
    "Gemma4ForConditionalGeneration": TinyModel(
        {
            "text_config": {
                **TEXT,
                **HEADS,
                **WINDOW,
                "global_head_dim": 32,
                "vocab_size_per_layer_input": 512,
                "hidden_size_per_layer_input": 8,
                "num_kv_shared_layers": 0,
                "final_logit_softcapping": 30.0,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
            },
            "audio_config": None,
            "image_token_id": 500,
        }
    ),
    "InternVLForConditionalGeneration": TinyModel(
        {
            "text_config": {**TEXT, **HEADS, "model_type": "qwen3"},
            "vision_config": {**SIGLIP, "image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": 500,
            "image_seq_length": 4,
        }
    ),
    "Llama4ForConditionalGeneration": TinyModel(
        {
            "text_config": {
                **TEXT,
                **HEADS,
                **ONE_EXPERT,
                "intermediate_size_mlp": 192,
                "num_hidden_layers": 4,
            },
            "vision_config": {
                **SIGLIP,
                "intermediate_size": 128,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
                "pixel_shuffle_ratio": 0.5,
            },
            **IMAGE_INDICES,
        }
    ),
    "LlavaForConditionalGeneration": TinyModel(
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 32},
            "image_token_index": 500,
        }
    ),
    "Mistral3ForConditionalGeneration": TinyModel(
        {
            "text_config": {**TEXT, **HEADS, "model_type": "mistral"},
            "vision_config": {**SIGLIP, "model_type": "pixtral", "head_dim": 16},
            "image_token_index": 500,
            "spatial_merge_size": 2,
        }
    ),
    "Qwen2_5_VLForConditionalGeneration": TinyModel(
        {
            "text_config": {**TEXT, **mrope(8, 4, 4)},
            "vision_config": {**BLOCKS, "window_size": 8, "fullatt_block_indexes": [1]},
            **IMAGE_TOKENS,
        }
    ),
    "Qwen3VLForConditionalGeneration": TinyModel(
        {
            "text_config": {**TEXT, **HEADS, **mrope(8, 4, 4, mrope_interleaved=True)},
            "vision_config": {**BLOCKS, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **IMAGE_TOKENS,
        }
    ),
    "Qwen3_5ForConditionalGeneration": TinyModel(
        {
            "text_config": QWEN35_TEXT,
            "vision_config": {**BLOCKS, "num_position_embeddings": 16, "deepstack_visual_indexes": []},
            **IMAGE_TOKENS,
        },
        "bfloat16",
        "vLLM's linear attention for CPUs",
    ),
    "Qwen3_5MoeForConditionalGeneration": TinyModel(
        {
            "text_config": {**QWEN35_TEXT, **EXPERTS, **SHARED_EXPERT},
            "vision_config": {**BLOCKS, "num_position_embeddings": 16, "deepstack_visual_indexes": []},
            **IMAGE_TOKENS,
        },
        "bfloat16",
        "vLLM's linear attention for CPUs",
    ),
}
"""By architecture."""
REPRESENTATIVES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3_5ForConditionalGeneration",
)
"""One of each kind: dense, mixture, hybrid, multimodal."""


FREQUENCIES = {"rope_theta": 1e4, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", **FREQUENCIES, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
YARN = {"rope_type": "yarn", **FREQUENCIES, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {"rope_type": "llama3", **FREQUENCIES, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
SHORT_WINDOW = {"sliding_window": 8}
"""Shorter than the rows that are compared."""
WINDOWS = {**SHORT_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi3ForCausalLM longrope": ("Phi3ForCausalLM", {"rope_parameters": LONGROPE, **FREQUENCIES}),
    "LlamaForCausalLM llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "LlamaForCausalLM yarn": ("LlamaForCausalLM", {"rope_parameters": YARN}),
    "LlamaForCausalLM linear": ("LlamaForCausalLM", {"rope_parameters": LINEAR, "attention_bias": True}),
    "LlamaForCausalLM dynamic": ("LlamaForCausalLM", {"rope_parameters": DYNAMIC}),
    "Qwen2ForCausalLM yarn": ("Qwen2ForCausalLM", {"rope_parameters": YARN}),
    "Qwen3ForCausalLM yarn": ("Qwen3ForCausalLM", {"rope_parameters": YARN}),
    "MistralForCausalLM windows": ("MistralForCausalLM", SHORT_WINDOW),
    "Gemma2ForCausalLM caps, windows": (
        "Gemma2ForCausalLM", {**WINDOWS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "Gemma3ForCausalLM linear, windows": ("Gemma3ForCausalLM", {**WINDOWS, "rope_parameters": _GEMMA3_ROPE}),
    "GptOssForCausalLM yarn, windows": (
        "GptOssForCausalLM", {**WINDOWS, "rope_parameters": {**YARN, "truncate": False}},
    ),
    "GraniteForCausalLM scales": (
        "GraniteForCausalLM", {"attention_multiplier": 0.4, "residual_multiplier": 0.22, "logits_scaling": 4.0},
    ),
    "Cohere2ForCausalLM scales": ("Cohere2ForCausalLM", {"logit_scale": 0.0625}),
    "Olmo3ForCausalLM windows": ("Olmo3ForCausalLM", WINDOWS),
    "Exaone4ForCausalLM windows": ("Exaone4ForCausalLM", WINDOWS),
    "MixtralForCausalLM windows": ("MixtralForCausalLM", SHORT_WINDOW),
    "Qwen3MoeForCausalLM yarn": ("Qwen3MoeForCausalLM", {"rope_parameters": YARN, "norm_topk_prob": True}),
}  # fmt: skip
"""Further configurations of the classes: what real checkpoints set, with values that these rows and scores reach. By a
name whose rest says what is set."""
MODELS |= {
    name: replace(MODELS[kind], config={**MODELS[kind].config, **settings})
    for name, (kind, settings) in VARIANTS.items()
}


def class_name(name: str) -> str:
    return name.partition(" ")[0]


def build_config(name: str) -> Any:
    import transformers

    return getattr(transformers, class_name(name)).config_class(**MODELS[name].config)


def build_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the random model, in which no norm and no bias has its initial value. Scores are of the order of 10."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, class_name(name))
    model = kind._from_config(build_config(name), dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2 if _SCORES.search(parameter_name) else 0.05)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def write_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Write the model in Hugging Face format, and return it."""
    model = build_model(name, dtype)
    model.save_pretrained(folder)
    return model
