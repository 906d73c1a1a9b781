"""Chat templates are loaded as the head loads tokenizers: with transformers, which takes seconds to import."""

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.job_sections import Model
from rljob_api.wire.calls import ToolSchema
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.head.inputs import load_tokenizer
from tests.support.chat_templates import build_template, build_tokenizer
from tests.support.model_templates import HYBRID_QWEN3

TOOLS = [ToolSchema(name="add", description="Adds.", parameters={"type": "object", "properties": {}})]
CHAT = [{"role": "user", "content": "What is 2 + 3?"}]


def test_a_template_is_loaded_from_a_folder(tmp_path):
    build_template("qwen25")._tokenizer.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), Model(source=str(tmp_path)))
    loaded = ChatTemplate(tokenizer)
    text = build_template("qwen25").render(CHAT, TOOLS, generate=True)
    assert loaded.render(CHAT, TOOLS, generate=True) == text
    assert loaded.encode(text) == build_template("qwen25").encode(text)
    assert ChatTemplate(tokenizer, "llama3").tool_format == "llama3"


def test_the_jobs_template_replaces_the_models_and_a_base_model_gets_one(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert not getattr(load_tokenizer(str(tmp_path), Model(source=str(tmp_path))), "chat_template", None)
    model = Model.model_validate({"source": str(tmp_path), "chatTemplate": {"inline": HYBRID_QWEN3}})
    loaded = ChatTemplate(load_tokenizer(str(tmp_path), model), arguments={"enable_thinking": False})
    assert loaded.render(CHAT, [], generate=True).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_folder_without_a_tokenizer_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"spec\.model\.source: cannot load the tokenizer"):
        load_tokenizer(str(tmp_path), Model(source=str(tmp_path)))
