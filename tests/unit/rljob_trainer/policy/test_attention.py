"""Packed attention: the sequences of a line, and the same results as with a dense mask."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.errors import UserError
from rljob_trainer.policy import attention
from rljob_trainer.policy.layout import MASKED_TREES, PACKED_ROWS, PACKED_TREES, PLAIN

CPU = torch.device("cpu")

LINES = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=1, max_size=4)), min_size=1, max_size=4
)
"""Trees: the length of the prompt, and of each branch. A branch of one token has no column."""


def line_of(trees):
    """Return trees and branches of each column."""
    columns = [
        (number, branch)
        for number, (prompt, lengths) in enumerate(trees)
        for branch, length in enumerate([prompt, *lengths])
        for _ in range(length)
    ]
    return tuple(np.array(values, np.int32) for values in zip(*columns, strict=True))


def visible_by_definition(trees, branches):
    """Return [query, key]: a token sees its own branch and its prompt, up to itself."""
    same = trees[:, None] == trees[None, :]
    same &= (branches[None, :] == 0) | (branches[None, :] == branches[:, None])
    return same & np.tri(len(trees), dtype=bool)


@given(LINES)
def test_each_query_sees_the_keys_of_its_branch_and_prompt_once(trees):
    trees, branches = line_of(trees)
    segments = attention.find_segments(trees, branches, CPU)
    query_ends, key_ends = segments.query_ends.tolist(), segments.key_ends.tolist()
    assert (query_ends[0], query_ends[-1]) == (0, len(trees)), "every query is in one sequence"
    keys = np.arange(len(trees)) if segments.keys is None else segments.keys.numpy()
    assert key_ends[-1] == len(keys)
    visible = np.zeros((len(trees), len(trees)), int)
    for i in range(len(query_ends) - 1):
        num_queries, num_keys = query_ends[i + 1] - query_ends[i], key_ends[i + 1] - key_ends[i]
        assert num_queries <= segments.max_queries
        assert num_keys <= segments.max_keys
        for q in range(num_queries):  # causal, and the last query sees the last key
            np.add.at(visible[query_ends[i] + q], keys[key_ends[i] : key_ends[i + 1] - (num_queries - 1 - q)], 1)
    np.testing.assert_array_equal(visible, visible_by_definition(trees, branches))


def test_line_without_shared_prompts_copies_no_keys():
    segments = attention.find_segments(*line_of([(3, [4]), (2, [1])]), CPU)
    assert segments.keys is None
    assert segments.query_ends.tolist() == segments.key_ends.tolist() == [0, 7, 10]
    assert (segments.max_queries, segments.max_keys) == (7, 7)


@pytest.mark.parametrize("trees", [[(3, [4])], [(3, [4, 2, 5]), (1, [1]), (4, [0, 3])]])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_packed_attention_equals_a_dense_mask(trees, key_heads, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    # Flash attention has no kernel for fp32.
    dtype, dim, tolerance = (torch.float32, 8, 1e-5) if device == "cpu" else (torch.bfloat16, 64, 2e-2)
    trees, branches = line_of(trees)
    torch.manual_seed(0)
    states = [
        torch.randn(1, heads, len(trees), dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (4, key_heads, key_heads)
    ]
    segments = attention.find_segments(trees, branches, torch.device(device))
    packed, _ = attention.packed_attention(None, *states, None, packed=segments, scaling=0.3)
    mask = torch.tensor(visible_by_definition(trees, branches), device=device)
    dense = torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=mask, scale=0.3, enable_gqa=True)
    weights = torch.randn_like(packed)
    gradients = torch.autograd.grad((packed * weights).sum(), states)
    expected = torch.autograd.grad((dense.transpose(1, 2) * weights).sum(), states)
    torch.testing.assert_close(packed, dense.transpose(1, 2), rtol=tolerance, atol=tolerance)
    for found, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=2 * tolerance)


def test_gradients_of_copied_keys_add_up_in_fp32():
    """256 + 1 is 256 in bf16: a sum in bf16 would lose all copies but the first."""
    states = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    copies = attention._Copies.apply(states, torch.zeros(257, dtype=torch.int64))
    gradient = torch.ones(257, 1, dtype=torch.bfloat16)
    gradient[0] = 256
    copies.backward(gradient)
    assert states.grad.item() == 512


class Network:
    """What of a transformers model decides about packed attention."""

    _supports_attention_backend = _supports_flash_attn = True

    def __init__(self, **config):
        defaults = {"hidden_size": 64, "num_attention_heads": 4, "_attn_implementation": "sdpa"}
        self.config = SimpleNamespace(**{**defaults, **config})

    def set_attn_implementation(self, name):
        self.config._attn_implementation = name


@pytest.fixture(autouse=True)
def no_transformers(monkeypatch):
    monkeypatch.setattr(attention, "_register", lambda: None)


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return torch.device("cuda", 0)


def installed(network, wanted, device, dtype=torch.bfloat16):
    attention.install(network, wanted, dtype=dtype, device=device)
    return attention.find_layout(network)


def test_auto_packs_on_gpus_and_shares_prompts_under_masks_on_cpus(h200):
    assert installed(Network(), "auto", h200) is PACKED_TREES
    assert installed(Network(), "auto", CPU) is MASKED_TREES
    assert installed(Network(), "packed", CPU) is PACKED_TREES


@pytest.mark.parametrize(
    ("config", "dtype", "text"),
    [
        ({}, torch.float32, "needs trainer.dtype bfloat16 or float16"),
        ({"head_dim": 512}, torch.bfloat16, "no kernel for heads of 512"),
        ({"head_dim": 36}, torch.bfloat16, "no kernel for heads of 36"),
        ({"attn_logit_softcapping": 30.0}, torch.bfloat16, "limits its attention scores"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, torch.bfloat16, "without full attention"),
        ({"sliding_window": 512}, torch.bfloat16, "without full attention"),
    ],
)
def test_auto_falls_back_where_packed_says_why(config, dtype, text, h200):
    network = Network(**config)
    assert installed(network, "auto", h200, dtype) in (MASKED_TREES, PLAIN)
    with pytest.raises(UserError, match=f"^spec.trainer.attention: packed is not possible, because .*{text}"):
        installed(network, "packed", h200, dtype)


def test_auto_falls_back_on_gpus_before_ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert installed(Network(), "auto", torch.device("cuda", 0)) is MASKED_TREES


def test_a_model_with_a_state_has_a_line_for_each_row():
    network = Network()
    network._is_stateful = True
    assert attention.find_layout(network) is PLAIN


@pytest.mark.parametrize(
    ("supports_sdpa", "cap", "wanted", "chosen"),
    [
        (True, None, "auto", "sdpa"),
        (True, None, "packed", "sdpa"),
        (False, None, "auto", "eager"),
        (False, None, "sdpa", "sdpa"),
        (True, 50.0, "auto", "eager"),
        (True, 50.0, "flash_attention_2", "flash_attention_2"),
    ],
)
def test_auto_is_built_with_what_the_class_and_its_scores_need(supports_sdpa, cap, wanted, chosen):
    kind = SimpleNamespace(_supports_sdpa=supports_sdpa)
    assert attention.initial_attention(kind, limited(cap), wanted) == chosen


def test_sdpa_is_refused_for_a_model_that_limits_its_scores():
    with pytest.raises(UserError, match="limits its attention scores, which sdpa does not"):
        attention.initial_attention(SimpleNamespace(_supports_sdpa=True), limited(50.0), "sdpa")


def limited(cap):
    text = SimpleNamespace(attn_logit_softcapping=cap)
    return SimpleNamespace(get_text_config=lambda: text)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        ({"_attn_implementation": "eager"}, MASKED_TREES),
        ({"_attn_implementation": "flash_attention_2"}, PACKED_ROWS),
        ({"_attn_implementation": "flash_attention_2", "sliding_window": 64}, PLAIN),
        ({"_attn_implementation": "sdpa", "layer_types": ["linear_attention"]}, PLAIN),
        ({"_attn_implementation": "sdpa", "sliding_window": 64, "use_sliding_window": False}, MASKED_TREES),
    ],
)
def test_layout_follows_from_the_implementation_and_the_layers(config, layout):
    assert attention.find_layout(Network(**config)) is layout
