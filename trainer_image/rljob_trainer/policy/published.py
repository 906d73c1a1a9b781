"""What a rank publishes: names, shapes and dtypes first, then the tensors, one at a time as they are gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rljob_trainer.policy.lora import MergeCost

CONVERTED: dict[str, Tensor] = {}
"""Stands for parameters that a checkpoint holds otherwise: they are converted once all are gathered."""


@dataclass(frozen=True)
class Published:
    """A collective: every rank takes all tensors. Those of rank 0 are published."""

    described: Mapping[str, Tensor]
    """On the meta device. The tensors have these names, shapes and dtypes."""
    tensors: Iterator[tuple[str, Tensor]]
    has_plain_matrices: bool
    """Whether engines hold all matrices as they are, or fused and cut: not padded within rows, nor transposed."""
    merge_cost: MergeCost | None = None
    """Cost of adapters that are merged, once all tensors are taken; on rank 0."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], merge_cost: MergeCost | None = None) -> Published:
        """Describe tensors that are gathered."""
        described = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        return cls(described, iter(tensors.items()), has_plain_matrices=False, merge_cost=merge_cost)


def has_plain_matrices(network: nn.Module) -> bool:
    """Whether all parameters with more than one dimension are those of linear layers and embeddings."""
    others = (module for module in network.modules() if not isinstance(module, nn.Linear | nn.Embedding))
    return all(parameter.dim() < 2 for module in others for parameter in module.parameters(recurse=False))
