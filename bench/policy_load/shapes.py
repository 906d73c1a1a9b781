"""The measured models: the shapes of published ones, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memory_plan.cases import QWEN25_1B5, SMOLLM2_135M

MODELS: dict[str, dict[str, Any]] = {
    "tiny": SMOLLM2_135M
    | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    | {"num_key_value_heads": 2, "vocab_size": 512},
    "small": SMOLLM2_135M,
    "0.5b": QWEN25_1B5
    | {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_hidden_layers": 24},
    "1.5b": QWEN25_1B5,
}
"""tiny only tries the command out. The others are SmolLM2-135M, which CPUs can train, Qwen2.5-0.5B and Qwen2.5-1.5B."""


def write_model(config: dict[str, Any], folder: Path, device: str = "cpu") -> None:
    """Write a Hugging Face folder with random weights, as the trainer loads it. `device`: draws them; a CPU takes a
    minute for 1.5B."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    network.save_pretrained(folder)
