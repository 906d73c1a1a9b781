"""Which models engines hold as they are published."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rljob_trainer.policy.policy import Published, has_plain_matrices


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))


def test_linear_layers_embeddings_and_norms_are_plain() -> None:
    assert has_plain_matrices(nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)))


def test_transposed_matrices_convolutions_and_experts_are_not_plain() -> None:
    for module in (Conv1D(8, 8), nn.Conv1d(8, 8, 3), Router()):
        assert not has_plain_matrices(nn.Sequential(nn.Linear(8, 8), module)), module


def test_gathered_tensors_describe_themselves() -> None:
    published = Published.of({"a": torch.ones(3, 2, dtype=torch.bfloat16)})
    described = published.described["a"]
    assert (described.shape, described.dtype, described.is_meta) == ((3, 2), torch.bfloat16, True)
    assert not published.has_plain_matrices, "adapters are padded"
    assert [name for name, _ in published.tensors] == ["a"]
