"""From a model's source to a sharded module that scores tokens: Hugging Face loading, attention masks, FSDP2 units.

Knows transformers and FSDP2, but not the losses. Invariant: master weights are fp32, and computation uses the compute
dtype. `ScoringModel.forward` is the only way into the network, so that FSDP's hooks see every use of a parameter.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rljob_api.errors import TransientError, UserError
from rljob_inputs.hub.repository import repository_name
from rljob_inputs.models.config import HEAD_TRANSFORMS
from rljob_trainer.failures.configuration import ErrorFacts, is_infrastructure_error, summarize
from rljob_trainer.policy.micro_batches import MicroBatch
from rljob_trainer.policy.selected_logprobs import selected_logprobs


class ScoringModel(nn.Module):
    def __init__(self, network: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.network = network
        self.dtype = dtype

    def forward(
        self, batch: MicroBatch, temperature: float, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:  # [targets], [targets]
        head = self.network.get_output_embeddings()
        device = head.weight.device
        chosen = source_states(self.network.base_model, batch, device, self.dtype)
        targets = _integers(batch.targets, device)
        return selected_logprobs(chosen, head.weight, targets, temperature, entropy_gradient)


def source_states(base_model: Any, batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the hidden states that predict the targets.  [targets, hidden]"""
    hidden = base_model(
        input_ids=_integers(batch.token_ids, device),
        use_cache=False,
        **_attention_inputs(batch, device, dtype),
    ).last_hidden_state  # [lines, length, hidden]
    return hidden.flatten(0, 1)[_integers(batch.sources, device)]


def _integers(values: NDArray[np.int32], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _attention_inputs(batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the mask and positions. Plain lines need none: the causal mask hides padding on the right."""
    if batch.is_plain:
        return {}
    trees = _integers(batch.trees, device)  # [lines, length]
    branches = _integers(batch.branches, device)
    length = trees.shape[1]
    visible = trees[:, :, None] == trees[:, None, :]  # [lines, query, key]
    visible &= (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    visible &= torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -math.inf)
    return {
        "attention_mask": mask[:, None],
        "position_ids": _integers(batch.position_ids, device),
    }


def load_network(source: str, *, dtype: torch.dtype, attention: str, options: dict[str, Any]) -> Any:
    """Load the causal language model at `source`, a folder or hf://org/name. Raise UserError if that fails."""
    from transformers import AutoModelForCausalLM

    try:
        network = AutoModelForCausalLM.from_pretrained(
            repository_name(source), dtype=dtype, attn_implementation=attention, **options
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers, safetensors and the hub's client raise dozens of types
        facts = ErrorFacts.of(error)
        if is_infrastructure_error(facts):
            raise TransientError(f"cannot load the model from {source}: {summarize(facts)}") from error
        raise UserError(
            f"spec.model.source: cannot load a causal language model from {source}: {summarize(facts)}; "
            "use a Hugging Face folder with config.json and safetensors"
        ) from error
    changed = [name for name in HEAD_TRANSFORMS if getattr(network.config, name, None) not in (None, 1, 1.0)]
    if changed or getattr(network.get_output_embeddings(), "bias", None) is not None:
        raise UserError(
            f"spec.model.source: {source} changes its logits after the head ({', '.join(changed) or 'bias'}), "
            "which the trainer does not support; use a model with a plain head"
        )
    return network


def can_share_prompts(config: Any) -> bool:
    """Whether the model supports tree-shaped attention. It needs masks (sdpa, eager) and full attention in every layer:
    windows and recurrences count tokens of a line, not of a row."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or config._attn_implementation not in ("sdpa", "eager"):
        return False
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return bool(getattr(config, "layer_types", None) or not windowed)


def shard(network: Any, *, mesh: DeviceMesh, dtype: torch.dtype, keep_gathered: bool) -> ScoringModel:
    """Return the sharded model that scores tokens with `network`."""
    model = ScoringModel(network, dtype)
    shard_units(model, network, mesh=mesh, dtype=dtype, keep_gathered=keep_gathered)
    return model


def shard_units(
    model: nn.Module, network: nn.Module, *, mesh: DeviceMesh, dtype: torch.dtype, keep_gathered: bool
) -> None:
    """Apply FSDP2 over `mesh` to `model`: one unit per decoder layer of its `network` and one for the rest, so tied
    embeddings share a unit."""
    network.train()
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in _decoder_layers(network):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=not keep_gathered)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is a sum over tokens, so gradients of the ranks are summed, not averaged.
            module.set_force_sum_reduction_for_comms(True)
            if mesh.size() > 1:  # with one rank, FSDP2 would copy each gradient once more to divide it
                module.set_gradient_divide_factor(1.0)


def _decoder_layers(network: nn.Module) -> list[nn.Module]:
    kinds = set(getattr(network, "_no_split_modules", None) or [])
    layers = [module for module in network.modules() if type(module).__name__ in kinds]
    if layers:
        return layers
    longest = max((m for m in network.modules() if isinstance(m, nn.ModuleList)), key=len, default=nn.ModuleList())
    return list(longest)
