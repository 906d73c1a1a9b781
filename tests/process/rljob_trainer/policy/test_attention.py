"""Packed rows through models of transformers: log-probs and gradients of each row are those of the row alone."""

import numpy as np
import pytest
import torch

from rljob_trainer.episodes.types import NOT_SAMPLED, TrainRow
from rljob_trainer.policy import attention
from rljob_trainer.policy.compilation import prepare_layers
from rljob_trainer.policy.model_loading import ScoringModel, compute_as_sampled, decoder_layers
from tests.support.micro_batches import plan_micro_batches

CONFIGS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def build_network(model_type):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(model_type, vocab_size=97, num_hidden_layers=2, **sizes, **CONFIGS[model_type])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()


def build_rows():
    generator = np.random.default_rng(0)
    prompts = [generator.integers(1, 97, length) for length in (5, 1, 9)]
    rows = []
    for prompt, answer in [(0, 4), (0, 7), (1, 1), (0, 1), (2, 6), (2, 3), (1, 5)]:
        tokens = np.concatenate([prompts[prompt], generator.integers(1, 97, answer)])
        sampled = np.arange(len(tokens)) >= len(prompts[prompt])
        ones = np.ones(len(tokens), np.float32)
        rows.append(TrainRow(tokens, sampled, -ones, ones, np.where(sampled, 0, NOT_SAMPLED).astype(np.int32)))
    return rows


def score(network, rows, micro_batch_tokens):
    """Return the log-probs of each row, and the gradient of their weighted sum."""
    model = ScoringModel(network, torch.float32)
    found, total = {}, 0.0
    layout = attention.find_layout(network.get_decoder())
    for batch in plan_micro_batches(rows, num_ranks=1, micro_batch_tokens=micro_batch_tokens, layout=layout)[0]:
        logprobs, *_ = model(batch)
        owners = batch.row_indices[batch.rows]
        total = total + (logprobs * torch.tensor(np.cos(owners + batch.positions), device=logprobs.device)).sum()
        for owner in set(owners.tolist()):
            found[owner] = logprobs[torch.tensor(owners == owner, device=logprobs.device)].detach()
    network.zero_grad()
    total.backward()
    return found, {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


def expect_equal(found, expected, tolerance):
    for owner, logprobs in expected[0].items():
        torch.testing.assert_close(found[0][owner], logprobs, rtol=tolerance, atol=tolerance)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_packed_rows_have_the_logprobs_and_gradients_of_rows_alone(model_type):
    network, rows = build_network(model_type), build_rows()
    alone = score(network, rows, micro_batch_tokens=16)
    attention.install(network.get_decoder(), "packed", dtype=torch.float32, device=torch.device("cpu"))
    expect_equal(score(network, rows, micro_batch_tokens=64), alone, 1e-4)
    prepare_layers(decoder_layers(network), "full")
    expect_equal(score(network, rows, micro_batch_tokens=24), alone, 1e-4)


def test_dropout_of_the_configuration_is_off():
    """Rollouts sample without it: the same rows scored twice would have other log-probs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("gpt2", vocab_size=97, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    assert config.resid_pdrop == config.attn_pdrop == 0.1
    network, rows = AutoModelForCausalLM.from_config(config), build_rows()
    compute_as_sampled(network.train())
    first = score(network, rows, micro_batch_tokens=64)
    expect_equal(score(network, rows, micro_batch_tokens=64), first, 0)


def test_flash_attention_of_transformers_gets_the_lengths_of_packed_rows(monkeypatch):
    """flash-attn needs a GPU: its function is replaced by one call of SDPA per row."""
    from transformers import AttentionInterface

    network, rows = build_network("qwen2"), build_rows()
    alone = score(network, rows, micro_batch_tokens=16)
    lengths = []

    def flash(module, query, key, value, mask, **given):
        assert mask is None
        lengths.append(given["cu_seq_lens_q"].tolist())
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        query_ends, key_ends, max_queries, max_keys = (given[name] for name in names)
        segments = attention.Segments(query_ends, key_ends, None, max_queries, max_keys)
        scaling = given["scaling"]
        return attention.packed_attention(module, query, key, value, None, packed=segments, scaling=scaling)

    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash)
    network.config._attn_implementation_internal = "flash_attention_2"
    expect_equal(score(network, rows, micro_batch_tokens=4096), alone, 1e-4)
    computed = [len(row.token_ids) - 1 for row in rows]
    assert sorted(np.diff(lengths[0]).tolist()) == sorted(computed), "one sequence per row"


@GPU
@pytest.mark.parametrize("model_type", CONFIGS)
def test_packed_rows_on_a_gpu_have_the_logprobs_of_rows_alone(model_type):
    network, rows = build_network(model_type).to("cuda", torch.bfloat16), build_rows()
    alone = score(network, rows, micro_batch_tokens=16)
    attention.install(network.get_decoder(), "auto", dtype=torch.bfloat16, device=torch.device("cuda"))
    assert network.config._attn_implementation == attention.PACKED
    expect_equal(score(network, rows, micro_batch_tokens=64), alone, 0.1)
