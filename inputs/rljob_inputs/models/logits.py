"""What a model does to its logits after the head: a factor, and a soft limit. Pure.

transformers gives these settings other names in each family. Invariant: a model whose forward pass does anything else
is refused by the table of architectures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Settings of Cohere, Falcon-H1 and Muse: the logits are multiplied by it."""
_DIVISOR = "logits_scaling"
"""Setting of Granite and MiniCPM3. HyperCLOVA X multiplies by the setting of the same name."""
_MULTIPLIES_BY_DIVISOR = ("hyperclovax",)
_LIMIT = "final_logit_softcapping"
"""Setting of Gemma."""


@dataclass(frozen=True)
class LogitTransform:
    """logits = limit x tanh(factor x (hidden @ weight.T) / limit); without a limit, factor x (hidden @ weight.T)."""

    factor: float = 1.0
    limit: float | None = None


def find_logit_transform(text_config: Mapping[str, Any]) -> LogitTransform:
    """`text_config`: the part of config.json about text."""

    def number(name: str) -> float | None:
        value = text_config.get(name)
        return float(value) if isinstance(value, int | float) and value else None

    factor = 1.0
    for name in _FACTORS:
        factor *= number(name) or 1.0
    divisor = number(_DIVISOR) or 1.0
    is_factor = text_config.get("model_type") in _MULTIPLIES_BY_DIVISOR
    return LogitTransform(factor * divisor if is_factor else factor / divisor, number(_LIMIT))
