"""Shapes of one family of models from 0.5B to 32B, to say which size fits. As their config.json has them."""

from typing import Any


def _qwen(hidden: int, layers: int, heads: int, key_heads: int, intermediate: int, *, is_tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 32768,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": is_tied,
        "vocab_size": 151936 if is_tied else 152064,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-32B": _qwen(5120, 64, 40, 8, 27648, is_tied=False),
    "Qwen2.5-14B": _qwen(5120, 48, 40, 8, 13824, is_tied=False),
    "Qwen2.5-7B": _qwen(3584, 28, 28, 4, 18944, is_tied=False),
    "Qwen2.5-3B": _qwen(2048, 36, 16, 2, 11008, is_tied=True),
    "Qwen2.5-1.5B": _qwen(1536, 28, 12, 2, 8960, is_tied=True),
    "Qwen2.5-0.5B": _qwen(896, 24, 14, 2, 4864, is_tied=True),
}
"""By name, the largest first."""
