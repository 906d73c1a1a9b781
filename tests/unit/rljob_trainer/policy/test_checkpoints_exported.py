"""config.json of an export, as readers of transformers 4 and 5 need it."""

import json

import pytest
from transformers import AutoConfig

from rljob_trainer.policy.checkpoints import spell_rope, write_config
from tests.support.tiny_models import MODELS, build_config

CHANGED = {"dtype", "architectures", "tie_word_embeddings"}
LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}


def export(folder, source, dtype="bfloat16", *, is_tied=False):
    """Return the export's config.json of a model whose config.json is `source`."""
    (folder / "config.json").write_text(json.dumps(source))
    loaded = AutoConfig.from_pretrained(folder)
    write_config(folder, loaded, dtype, "Exported", is_tied=is_tied)
    return json.loads((folder / "config.json").read_text())


def read(folder):
    """Return what transformers 5 reads of the part about text, without the older name of rope_type."""
    found = AutoConfig.from_pretrained(folder).get_text_config().to_dict()
    (found.get("rope_parameters") or {}).pop("type", None)
    return found


@pytest.mark.parametrize("name", sorted(MODELS))
def test_both_generations_find_the_rope_of_every_architecture(name, tmp_path):
    config = build_config(name)
    config.save_pretrained(tmp_path)
    source, loaded = json.loads((tmp_path / "config.json").read_text()), read(tmp_path)
    is_tied = AutoConfig.from_pretrained(tmp_path).tie_word_embeddings
    written = export(tmp_path, source, is_tied=is_tied)
    text, before = written.get("text_config", written), source.get("text_config", source)
    if parameters := before.get("rope_parameters"):
        assert text["rope_theta"] == parameters.get("full_attention", parameters)["rope_theta"]
    for part in filter(None, [written, *(written.get(each) for each in config.sub_configs)]):
        assert part["dtype"] == part["torch_dtype"] == "bfloat16"
    after = read(tmp_path)
    assert {name: after[name] for name in loaded.keys() - CHANGED} == {
        name: loaded[name] for name in loaded.keys() - CHANGED
    }


def test_what_the_source_says_stays_and_the_other_spelling_is_added(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    source = {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "rope_scaling": scaling,
        "torch_dtype": "float32",
        "own": {"a": 1},
    }
    written = export(tmp_path, source, "float16")
    assert {name: written[name] for name in source} == source | {"torch_dtype": "float16"}
    assert written["architectures"] == ["Exported"]
    assert written["rope_parameters"] == {**scaling, "rope_type": "yarn", "rope_theta": 1e6}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", ["InternVLForConditionalGeneration", "Qwen3VLForConditionalGeneration"])
def test_the_whole_and_its_text_say_whether_the_head_is_tied(name, is_tied, tmp_path):
    build_config(name).save_pretrained(tmp_path)
    written = export(tmp_path, json.loads((tmp_path / "config.json").read_text()), is_tied=is_tied)
    assert written["tie_word_embeddings"] is written["text_config"]["tie_word_embeddings"] is is_tied
    assert "tie_word_embeddings" not in written["vision_config"]


@pytest.mark.parametrize(
    ("parameters", "spelled"),
    [
        ({"rope_type": "default", "rope_theta": 1e6}, {"rope_theta": 1e6}),
        (
            {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        ),
        (
            {**LONG, "rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096},
            {
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [4.0]},
            },
        ),
        (
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            {
                "rope_theta": 1e6,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_local_base_freq": 1e4,
            },
        ),
        (  # Gemma 4
            {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        ),
    ],
)
def test_rope_is_spelled_as_transformers_4_does(parameters, spelled):
    assert spell_rope(parameters) == spelled


def test_sizes_have_their_older_names_too(tmp_path):
    build_config("Qwen3MoeForCausalLM").save_pretrained(tmp_path)
    written = export(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    assert written["num_experts"] == written["num_local_experts"] == 4
