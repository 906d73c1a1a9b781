"""Names and layout of a model's checkpoint, where transformers holds the parameters otherwise in memory.

transformers holds the experts of a layer as one parameter, and renames modules of some models (Mixtral). vLLM and other
programs expect what the checkpoint had. It follows from the rules with which transformers loads and saves the model.
Invariant: no value changes.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_ROUTER_BIASES = (".e_score_correction_bias", ".expert_bias")
"""Names of DeepSeek, GLM and others; of LFM2."""


def to_checkpoint(network: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that save_pretrained would write, of all `parameters` of the network. None shares memory with
    another one, which a file cannot store."""
    from transformers.core_model_loading import revert_weight_conversion

    kept = {id(tensor) for tensor in parameters.values()}
    tensors = revert_weight_conversion(network, dict(parameters))
    return {name: tensor if id(tensor) in kept else tensor.clone() for name, tensor in tensors.items()}


def persistent_buffers(network: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint has besides parameters, such as e_score_correction_bias of GLM-4-MoE."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in network.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def engine_parameters(network: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers that vLLM holds as parameters. Its own buffers, such as Gemma 4's layer_scalar,
    keep the values of the checkpoint, and no digest counts them."""
    buffers = persistent_buffers(network)
    return {name: buffer for name, buffer in buffers.items() if name.endswith(_ROUTER_BIASES)}
