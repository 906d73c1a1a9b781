"""Weights by their headers."""

import json

import pytest

from rljob_inputs.models.files import ModelFiles, open_model
from rljob_inputs.models.weights import count_parameters, find_matrices, find_missing, find_weight_problems
from tests.support.model_folder import CONFIG, write_model, write_weights


def problems(folder):
    return list(find_weight_problems(open_model(str(folder), None), CONFIG))


def test_complete_weights_have_no_problem_and_are_counted(tmp_path):
    write_model(tmp_path)
    assert not problems(tmp_path)
    assert count_parameters(open_model(str(tmp_path), None)) == 602


@pytest.mark.parametrize("num_bytes", [4, 100, 1_000])
def test_truncated_file_is_named(tmp_path, num_bytes):
    write_model(tmp_path)
    write_weights(tmp_path / "model.safetensors", {"embed": [300, 2]}, num_bytes)
    (problem,) = problems(tmp_path)
    assert str(tmp_path / "model.safetensors") in problem
    assert "copy or download it again" in problem


def test_missing_shard_is_named(tmp_path):
    write_model(tmp_path)
    index = {"weight_map": {"embed": "model.safetensors", "head": "model-2.safetensors", "x": "model-3.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = problems(tmp_path)
    assert "lacks model-2.safetensors and 1 more, which model.safetensors.index.json names" in problem


def test_what_is_not_weights_is_named(tmp_path):
    weights = write_model(tmp_path) / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "is a Git LFS pointer" in problems(tmp_path)[0]
    weights.write_bytes(b"\x00" * 50)
    assert "is not a safetensors file" in problems(tmp_path)[0]
    weights.unlink()
    assert problems(tmp_path) == [f"{tmp_path} has no weights (*.safetensors)"]
    (tmp_path / "model.gguf").touch()
    assert "GGUF files, which cannot be trained" in problems(tmp_path)[0]


def test_bias_of_the_head_is_reported(tmp_path):
    write_weights(write_model(tmp_path) / "model.safetensors", {"lm_head.bias": [4]})
    assert "adds a bias to its logits" in problems(tmp_path)[0]


def test_parameters_on_the_hub_are_estimated_from_sizes():
    files = ModelFiles("hf://o/m", {"a.safetensors": 400, "b.safetensors": 200}, lambda name: None, None)
    assert count_parameters(files, "float32") == 150
    assert count_parameters(files, None) == 300


def test_modules_with_a_matrix_are_found_by_the_last_part_of_their_names(tmp_path):
    shapes = {"model.0.q_proj.weight": [2, 2], "model.1.q_proj.weight": [2, 2], "norm.weight": [2], "q.bias": [2]}
    write_weights(write_model(tmp_path) / "model.safetensors", shapes)
    assert find_matrices(open_model(str(tmp_path), None)) == {"q_proj"}
    assert not find_matrices(ModelFiles("hf://o/m", {"a.safetensors": 400}, lambda name: None, None))


def test_parts_that_read_no_text_are_not_counted(tmp_path):
    shapes = {
        "model.language_model.layers.0.q_proj.weight": [2, 2],
        "model.visual.blocks.0.attn.qkv.weight": [6, 2],
        "vision_tower.encoder.fc1.weight": [2, 2],
        "multi_modal_projector.linear_1.weight": [2, 2],
        "mtp.layers.0.fc.weight": [2, 2],
        "lm_head.weight": [3, 2],
    }
    write_weights(write_model(tmp_path) / "model.safetensors", shapes)
    files = open_model(str(tmp_path), None)
    assert count_parameters(files) == 4 + 6
    assert find_matrices(files) == {"q_proj", "lm_head"}


def test_names_come_from_headers_from_the_index_or_from_the_header_on_the_hub(tmp_path):
    names = ["_orig_mod.model.embed_tokens.weight"]
    folder = write_model(tmp_path)
    write_weights(folder / "model.safetensors", {names[0]: [2]})
    assert "whose name a wrapper has changed" in problems(folder)[0]
    index = tmp_path / "index"
    index.write_text(json.dumps({"weight_map": {names[0]: "model-1.safetensors"}}))
    sizes = {"model-1.safetensors": 8, "model.safetensors.index.json": 8}
    sharded = ModelFiles("hf://o/m", sizes, lambda name: index, None)
    single = ModelFiles("hf://o/m", {"model.safetensors": 8}, lambda name: index, None, lambda name: names)
    for files in (sharded, single):
        (problem,) = find_weight_problems(files, CONFIG)
        assert problem.startswith("hf://o/m has the weight _orig_mod.model.embed_tokens.weight")


LAYERED = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "tie_word_embeddings": False}
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
    assert list(find_missing(NAMES, LAYERED)) == []
    (found,) = find_missing(names, LAYERED)
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
    merged = {name: value for name, value in {**LAYERED, **config}.items() if value is not None}
    assert list(find_missing(names, merged)) == []
