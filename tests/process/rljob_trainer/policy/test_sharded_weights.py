"""Models that each rank reads in slices are those that transformers loads: loading_scenarios.py opens each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import loading_scenarios
from tests.support.loading_scenarios import MODELS, WHOLE
from tests.support.rank_programs import run_forked

CASES = [*(f"{name}-float32" for name in (*MODELS, *WHOLE)), "llama-bfloat16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_forked(loading_scenarios.__name__, tmp_path_factory.mktemp("loading"))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_sharded_model_is_the_one_that_transformers_loads(name, num_ranks, outcome):
    for ours in outcome(name, num_ranks):
        assert ours["names"]
        assert ours["parameters"] == ours["buffers"] == [], "these differ"
        assert ours["config"]
        assert ours["generation"]
        assert ours["is_tied"] == ours["is_tied_by_transformers"]
        assert ours["generator"], "the random numbers that follow are the same"
        assert torch.equal(ours["logits"], ours["expected_logits"])


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_reads_nothing_but_its_own_shards(name, num_ranks, outcome):
    for ours in outcome(f"{name}-float32", num_ranks):
        assert ours["filling"] == ours["held"] > 0
        assert ours["opening"] == (2 * 32 * 101 if "copy" in name else 0), "only copies are compared"


def test_models_that_cannot_be_read_in_slices_are_loaded_whole(outcome):
    for name in WHOLE:
        assert outcome(f"{name}-float32", 2)[0]["filling"] == 0


def test_a_model_whose_files_lack_a_weight_is_refused_with_its_name(outcome):
    broken = outcome("broken", 2)[0]
    for name, message in {
        "missing": "its files lack the weights model.norm.weight;",
        "missing-in-bin": "its files lack the weights model.norm.weight;",
        "no-head": "its files lack the weights lm_head.weight;",
        "renamed": "more, but have _orig_mod.lm_head.weight, which is not a weight of the model;",
        "mismatched": "",
    }.items():
        assert broken[name].startswith("spec.model.source: cannot load a causal language model from "), broken[name]
        assert message in broken[name]


def test_adapters_start_at_the_same_values_without_the_weights_of_the_model(outcome):
    adapters = outcome("adapters", 2)[0]
    assert adapters["ours"].keys() == adapters["theirs"].keys()
    for key, tensor in adapters["theirs"].items():
        assert loading_scenarios.is_same(adapters["ours"][key], tensor), key
    assert any(key.endswith("q_proj.base_layer.weight") for key in adapters["on_meta"])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_critic_has_the_decoder_and_does_not_read_the_head(num_ranks, outcome):
    for ours in outcome("critic", num_ranks):
        assert ours["is_same"]
        assert "model.embed_tokens.weight" in ours["read"]
        assert "lm_head.weight" not in ours["read"]
