"""Weights by their headers."""

import json

import pytest

from rljob_inputs.models.files import ModelFiles, open_model
from rljob_inputs.models.weights import count_parameters, find_matrices, find_weight_problems
from tests.support.model_folder import write_model, write_weights


def problems(folder):
    return list(find_weight_problems(open_model(str(folder), None)))


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
