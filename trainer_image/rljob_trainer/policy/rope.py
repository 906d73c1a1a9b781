"""Rotary embeddings whose frequencies depend on the length of a text: fixed for the job, as vLLM fixes them.

transformers chooses them in each forward pass, by the longest row of a micro-batch: a row's log-probs would depend on
its neighbours, and differ from the rollout's.

    longrope   the long factors if rollout.maxModelLen is above original_max_position_embeddings, else the short ones
    dynamic    those of max_position_embeddings; vLLM does not lengthen them, so a longer maxModelLen is refused
"""

from typing import Any

from rljob_api.errors import UserError


def fix_frequencies(network: Any, max_model_len: int | None) -> None:
    """Fix the frequencies of `network`, whose buffers are computed. `max_model_len`: None is the engine's default."""
    for module in network.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fix(module, None, kinds, max_model_len)
        elif isinstance(kinds, dict):
            module.rope_type = {each: _fix(module, each, kind, max_model_len) for each, kind in kinds.items()}


def _fix(module: Any, layer_type: str | None, kind: str, max_model_len: int | None) -> str:
    """Return the type with which transformers leaves the frequencies as they are."""
    config = module.config
    if kind == "longrope":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        # As vLLM: without a limit, longer texts are refused, for the sake of short ones.
        length = max_model_len or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length, layer_type=layer_type)
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        module.register_buffer(name, frequencies, persistent=False)
        return "default"
    if "dynamic" not in kind:
        return kind
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    limit = config.max_position_embeddings
    if max_model_len is not None and max_model_len > limit and not parameters.get("alpha"):
        raise UserError(
            f"its rope is of the type dynamic, which vLLM does not lengthen beyond {limit} tokens "
            f"(max_position_embeddings); set spec.rollout.maxModelLen to {limit} or less, got {max_model_len}"
        )
    return "default"
