"""Reading what a model's files say about its use."""

import json

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_inputs.findings import InputError
from rljob_inputs.models.own_settings import load_model_settings
from tests.support.model_folder import write_model

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ 'Answer:' if add_generation_prompt }}"


def load(folder, **spec):
    base = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t"}},
        "rewards": [{"name": "r", "function": {"inline": "x"}}],
    }
    merged = {name: {**base.get(name, {}), **spec.get(name, {})} for name in {*base, *spec} - {"rewards"}}
    job = RLJob.model_validate({"metadata": {"name": "j"}, "spec": base | merged})
    return load_model_settings(job, str(folder), {})


def test_a_job_is_resolved_by_the_files_of_its_model(tmp_path):
    folder = write_model(tmp_path, {"max_position_embeddings": 4096})
    generation = {"max_new_tokens": 100, "eos_token_id": [256, 7], "do_sample": True, "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    settings = load(folder)
    assert settings.job.spec.rollout.sampling.max_tokens == 100
    assert settings.job.spec.evaluation.sampling.temperature == 0.5
    assert (settings.model_length, settings.context_length) == (4096, 4096)
    assert settings.own.special_tokens == {"</s>": 256}
    shown = {each.field: each.value for each in settings.from_model}
    assert shown["spec.rollout.sampling.stop"] == ["</s>", "7"], "the template's end is the end of sequence"


def test_a_length_that_arguments_of_vllm_change_is_not_known(tmp_path):
    settings = load(write_model(tmp_path), rollout={"extraArgs": ["--max-model-len=8"], "maxModelLen": 32})
    assert (settings.model_length, settings.context_length) == (None, 32)


def test_the_jobs_template_replaces_the_models(tmp_path):
    folder = write_model(tmp_path, chat_template="{% if %}")  # that of the model does not matter
    template = TEMPLATE.replace("{{ eos_token }}", "<end>")
    settings = load(folder, model={"chatTemplate": {"inline": f"{template}{{# <think> #}}"}})
    shown = {each.field: each.source for each in settings.from_model}
    assert shown["spec.rollout.sampling.maxTokens"].startswith("model.chatTemplate: the model may think")


def test_model_without_config_is_a_user_error(tmp_path):
    (write_model(tmp_path) / "config.json").unlink()
    with pytest.raises(UserError, match=r"^spec.model.source: .* has no config.json; set a Hugging Face folder"):
        load(tmp_path)


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "job"])
def test_a_broken_template_is_reported_where_it_is(tmp_path, place):
    folder = write_model(tmp_path, chat_template=None)
    if place == "chat_template.jinja":
        (folder / place).write_text("\n{% if %}")
    elif place == "tokenizer_config.json":
        (folder / place).write_text(json.dumps({"chat_template": "\n{% if %}"}))
    model = {"chatTemplate": {"inline": "\n{% if %}"}} if place == "job" else {}
    with pytest.raises(InputError, match="is not a Jinja template: line 2") as caught:
        load(folder, model=model)
    field = "spec.model.chatTemplate" if place == "job" else "spec.model.source"
    assert caught.value.path == field
    assert (place in str(caught.value)) == (place != "job")


@pytest.mark.parametrize(
    ("name", "text"), [("generation_config.json", "{"), ("tokenizer.json", "[]"), ("config.json", "no")]
)
def test_a_broken_file_is_an_error_of_the_model(tmp_path, name, text):
    (write_model(tmp_path) / name).write_text(text)
    with pytest.raises(UserError, match=rf"^spec.model.source: .*/{name} "):
        load(tmp_path)


def test_special_tokens_without_tokenizer_json_are_in_the_configuration(tmp_path):
    folder = write_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    added = {"5": {"content": "<x>", "special": True}, "6": {"content": "y", "special": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "eos_token": "<x>"}))
    assert load(folder).own.special_tokens == {"<x>": 5}
