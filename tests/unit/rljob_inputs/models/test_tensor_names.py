"""What a checkpoint lacks, by the names of its tensors."""

import pytest

from rljob_inputs.models.tensor_names import find_missing

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "tie_word_embeddings": False}
PARTS = ("self_attn.q_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
NAMES = {"model.embed_tokens.weight", "lm_head.weight"} | {
    f"model.layers.{number}.{part}" for number in (0, 1) for part in PARTS
}


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (NAMES - {"model.layers.1.mlp.up_proj.weight"}, "lacks the weights model.layers.1.mlp.up_proj.weight;"),
        (NAMES - {"model.layers.0.mlp.up_proj.weight"}, "lacks the weights model.layers.0.mlp.up_proj.weight;"),
        ({name for name in NAMES if "layers.1." not in name}, "lacks the weights model.layers.1.*;"),
        (NAMES - {"lm_head.weight"}, "lacks the weights lm_head.weight;"),
        ({f"_orig_mod.{name}" for name in NAMES}, "has the weight _orig_mod.lm_head.weight, whose name a wrapper"),
        ({f"module.{name}" for name in NAMES}, "has the weight module.lm_head.weight, whose name a wrapper"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(names, problem):
    assert list(find_missing(NAMES, CONFIG)) == []
    (found,) = find_missing(names, CONFIG)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("names", "config"),
    [
        (NAMES - {"lm_head.weight"}, {"tie_word_embeddings": True}),
        (NAMES - {"lm_head.weight"}, {"architectures": ["Gemma2ForCausalLM"], "tie_word_embeddings": None}),
        ({"model.layers.2.enorm.weight", *NAMES}, {}),  # a further layer, which predicts further tokens
        (
            (NAMES - {"model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"})
            | {"model.layers.1.mlp.experts.0.up_proj.weight"},
            {},
        ),
        (NAMES - {"model.layers.1.self_attn.q_proj.weight"}, {"layer_types": ["full_attention", "linear_attention"]}),
        (NAMES - {"model.layers.1.self_attn.q_proj.weight"}, {"num_kv_shared_layers": 1}),
        (NAMES - {"model.layers.1.self_attn.q_proj.weight"}, {"architectures": ["Zamba2ForCausalLM"]}),
        ({"embed", "head"}, {}),
    ],
)
def test_a_complete_checkpoint_has_no_problem(names, config):
    merged = {name: value for name, value in {**CONFIG, **config}.items() if value is not None}
    assert list(find_missing(names, merged)) == []
