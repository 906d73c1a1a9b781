"""The tokenizer without transformers."""

import json

import pytest

from rljob_api.errors import UserError
from rljob_inputs.models.files import open_model
from rljob_inputs.models.tokenizer import load_tokenizer
from tests.support.model_folder import write_model

MESSAGES = [{"role": "user", "content": "héllo {{ x }}"}]


def load(folder):
    return load_tokenizer(open_model(str(folder), None))


def render(folder, messages=MESSAGES):
    return load(folder).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("end", ["</s>", {"content": "</s>", "special": True}])
def test_text_and_chats_are_tokenized(tmp_path, end):
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    tokenizer = load(tmp_path)
    assert len(tokenizer) == 257
    text = render(tmp_path)
    assert text == "<user>héllo {{ x }}</s><assistant>"
    short, long = tokenizer(["a", text], add_special_tokens=False)["input_ids"]
    assert len(short) == 1
    assert len(long) == len(text.replace("</s>", "").encode()) + 1, "</s> is one token"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] | tojson }}{% generation %}x{% endgeneration %}{{ strftime_now('') }}",
        "{% if true %}\n    {% if true %}{{ messages[0]['content'] | tojson }}x{% endif %}\n{% endif %}",
        "{% for m in messages %}{% break %}{% endfor %}{{ messages[0]['content'] | tojson }}x",
    ],
)
def test_templates_have_what_transformers_gives_them(tmp_path, template):
    write_model(tmp_path, chat_template=template)
    assert render(tmp_path) == '"héllo {{ x }}"x'


def test_arguments_are_variables_of_the_template_and_replace_special_tokens(tmp_path):
    write_model(tmp_path, chat_template="{{ effort | default('high') }}{{ eos_token }}{{ flag }}")
    options = {"add_generation_prompt": True, "tokenize": False}
    assert load(tmp_path).apply_chat_template(MESSAGES, **options) == "high</s>"
    found = load(tmp_path).apply_chat_template(MESSAGES, **options, effort="low", flag=False, eos_token="!")
    assert found == "low!False"


def test_a_given_template_replaces_the_models(tmp_path):
    write_model(tmp_path)
    tokenizer = load_tokenizer(open_model(str(tmp_path), None), "own {{ messages[0].content }}{{ eos_token }}")
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert text == "own héllo {{ x }}</s>"


def test_template_may_be_in_the_config_and_may_refuse(tmp_path):
    write_model(tmp_path, chat_template=None)
    assert load(tmp_path).chat_template is None
    file = tmp_path / "tokenizer_config.json"
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ raise_exception('no') }}"}]
    file.write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(Exception, match="no"):
        render(tmp_path)


def test_models_without_tokenizer_json_have_none_and_a_broken_one_is_named(tmp_path):
    file = write_model(tmp_path) / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer.json cannot be read"):
        load(tmp_path)
    file.unlink()
    assert load(tmp_path) is None
