"""The tokenizer without transformers gives the ids of transformers' own, for real tokenizers and templates."""

from __future__ import annotations

import json
import os

import pytest

from examples import prepare
from rljob_inputs.models.files import open_model
from rljob_inputs.models.tokenizer import load_tokenizer
from tests.paths import EXAMPLES

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
