"""Attention of padded blocks: each query over its keys, whatever the lengths, and gradients that equal autograd's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_trainer.policy import padded_attention
from rljob_trainer.policy.padded_attention import PaddedAttention, find_blocks

SEQUENCES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=6)
"""Number of queries, and of keys before those of the queries."""


@pytest.fixture(autouse=True)
def small_runs(monkeypatch):
    """Sequences of a few tokens are divided like those of thousands."""
    monkeypatch.setattr(padded_attention, "_RUN_QUERIES", 16)
    monkeypatch.setattr(padded_attention, "_MAX_SCORES", 1024)


def ends_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)])


def line_of(sequences, generator):
    """Return the ends of queries and keys, and a column for each key."""
    queries = ends_of([count for count, _ in sequences])
    keys = ends_of([count + before for count, before in sequences])
    return queries, keys, generator.integers(0, queries[-1], keys[-1])


def expected(query, key, value, line, scale):
    """Compute each sequence alone, in the precision of the states."""
    query_ends, key_ends, columns = line
    found = []
    for i in range(len(query_ends) - 1):
        q = query[query_ends[i] : query_ends[i + 1]].transpose(0, 1)
        k, v = (states[columns[key_ends[i] : key_ends[i + 1]]].transpose(0, 1) for states in (key, value))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        k, v = (states.repeat_interleave(len(q) // len(states), 0) for states in (k, v))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
        found.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(found)


def states_of(num_tokens, key_heads, dtype):
    torch.manual_seed(0)
    return [torch.randn(num_tokens, heads, 8, requires_grad=True, dtype=dtype) for heads in (4, key_heads, key_heads)]


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@settings(max_examples=30)
@given(sequences=SEQUENCES)
def test_outputs_and_gradients_equal_those_of_each_sequence_alone(key_heads, sequences):
    line = line_of(sequences, np.random.default_rng(0))
    states = states_of(int(line[0][-1]), key_heads, torch.float32)
    found = PaddedAttention.apply(*states, find_blocks(*line), 0.3)
    wanted = expected(*states, line, 0.3)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), states)
    for gradient, of_each in zip(gradients, torch.autograd.grad((wanted * weights).sum(), states), strict=True):
        torch.testing.assert_close(gradient, of_each, rtol=1e-4, atol=1e-4)


def test_scores_are_not_rounded_to_the_compute_dtype():
    """In bf16, scores of 256 and 257 are equal. In fp32 their weights differ by the factor e."""
    query = torch.tensor([16.0, 1.0], dtype=torch.bfloat16).view(1, 1, 2).expand(2, 1, 2)
    key = torch.tensor([[16.0, 0.0], [16.0, 1.0]], dtype=torch.bfloat16).view(2, 1, 2)
    value = torch.tensor([[0.0], [1.0]], dtype=torch.bfloat16).view(2, 1, 1)
    found = PaddedAttention.apply(query, key, value, find_blocks(ends_of([2]), ends_of([2]), None), 1.0)
    assert found[1].item() == pytest.approx(1 / (1 + np.exp(-1)), abs=0.01)


def test_blocks_of_a_line_have_every_query_once_and_a_bounded_number_of_scores():
    queries, keys = ends_of([100, *[3] * 200]), ends_of([100, *[20] * 200])
    found = find_blocks(queries, keys, None)
    blocks, places = found.blocks, found.places
    assert sorted(places.tolist()) == sorted(set(places.tolist()))
    columns = torch.cat([block.queries for block in blocks])
    assert columns[places].tolist() == list(range(700))
    several = [block.mask.numel() for block in blocks if block.shape[0] > 1]
    assert max(several) <= 1024, "only a single run may exceed the limit"
    assert len(several) == 100, "two sequences of 16 x 32 scores, padded, fit a block"
