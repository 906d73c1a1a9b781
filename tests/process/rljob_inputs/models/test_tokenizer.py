"""The tokenizer without transformers gives the ids of transformers' own, for real tokenizers and templates."""

from __future__ import annotations

import inspect
import json
import os

import pytest

from examples import prepare
from rljob_api.manifest.job_sections import Data, Model, TrainSource
from rljob_api.manifest.sources import RESERVED_TEMPLATE_ARGUMENTS, ChatTemplate
from rljob_inputs.data.prompts import tokenize
from rljob_inputs.models.files import open_model
from rljob_inputs.models.tokenizer import load_tokenizer
from rljob_trainer.head import inputs
from tests.paths import EXAMPLES
from tests.support.model_templates import GEMMA4, GPT_OSS, HYBRID_QWEN3

CHATS = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": " Ünïcode, \t 漢字 and 🙂 "}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c\n\n"}],
    [{"role": "user", "content": "<|im_start|>system\nignore<|im_end|> \\boxed{x} {{ x }} {% if %}"}],
]


@pytest.fixture(scope="module", params=["smollm2-135m-instruct", "tiny-qwen3", "bos"])
def folder(request, tmp_path_factory):
    """Folders as save_pretrained writes them. The third one's tokenizer adds a token at the start."""
    from transformers import AutoTokenizer

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if request.param != "bos":
        folder = prepare.MODELS / request.param
        if not folder.is_dir():
            pytest.skip(f"{folder} not found; python examples/prepare.py creates it")
        return folder
    from tokenizers import processors

    tiny = prepare.MODELS / "tiny-qwen3"
    if not tiny.is_dir():
        pytest.skip(f"{tiny} not found; python examples/prepare.py tiny creates it")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    start = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, tokenizer.convert_tokens_to_ids(start))]
    )
    tokenizer.add_special_tokens({"bos_token": start})
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}\n    {%- if message.role == 'user' %}\n"
        "[INST] {{ message['content'] | trim }} [/INST]\n    {%- else %}\n{{ message['content'] + eos_token }}\n"
        "    {%- endif %}\n{% endfor %}"
    )
    folder = tmp_path_factory.mktemp("bos")
    tokenizer.save_pretrained(folder)
    return folder


ARGUMENTS = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True, "reasoning_effort": "low"},
    {"enable_thinking": None, "names": ["a", {"b": 1.5}], "custom": "<&>"},
]
OWN = (
    "{{ bos_token }}{{ eos_token }}{{ names | tojson if names is defined }}{{ custom }}{{ reasoning_effort }}"
    "{% for m in messages %}\n<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("family", ["own", "hybrid qwen 3", "gemma 4", "gpt-oss"])
def test_texts_are_equal_with_the_jobs_template_and_its_variables(folder, family, arguments):
    texts = {"own": OWN, "hybrid qwen 3": HYBRID_QWEN3, "gemma 4": GEMMA4, "gpt-oss": GPT_OSS}
    inline = texts[family]
    model = Model(source=str(folder), chat_template=ChatTemplate(inline=inline))
    theirs = inputs.load_tokenizer(str(folder), model)
    ours = load_tokenizer(open_model(str(folder), None), inline)
    data = Data(train=TrainSource(source="/d"), chat_template_arguments=arguments)
    assert tokenize(data, CHATS, ours) == tokenize(data, CHATS, theirs)


def test_reserved_variables_are_the_parameters_of_transformers():
    """One that is missing there would be taken for a parameter, and never reach the template."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    taken = {
        name
        for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    }
    assert taken <= {*RESERVED_TEMPLATE_ARGUMENTS}


def test_ids_are_equal(folder):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(open_model(str(folder), None))
    rows = (EXAMPLES / "gsm8k" / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    texts = [json.loads(row)["question"] for row in rows] + [chat[-1]["content"] for chat in CHATS]
    assert ours(texts)["input_ids"] == theirs(texts)["input_ids"]
    chats = [*CHATS, *([{"role": "user", "content": text}] for text in texts)]
    options = {"add_generation_prompt": True, "tokenize": False}
    rendered = [ours.apply_chat_template(chat, **options) for chat in chats]
    assert rendered == [theirs.apply_chat_template(chat, **options) for chat in chats]
    expected = theirs(rendered, add_special_tokens=False)["input_ids"]
    assert ours(rendered, add_special_tokens=False)["input_ids"] == expected
