"""What an export has for conversations."""

import json
from types import SimpleNamespace

import pytest

from rljob_trainer.policy.checkpoints import add_end_ids, save_chat
from tests.support.chat_templates import FAMILIES, build_tokenizer

SPECIAL = {"</s>": 2, "<|im_end|>": 5}


@pytest.mark.parametrize(
    ("given", "stop", "expected"),
    [
        (2, [], 2),
        ([2, 5], ["<|im_end|>"], [2, 5]),
        (2, ["END", "<|im_end|>", "<|im_end|>"], [2, 5]),
        ([2], ["<|im_end|>"], [2, 5]),
        (None, ["<|im_end|>"], [5]),
        (None, ["END"], None),
    ],
)
def test_special_tokens_that_ended_answers_are_end_of_sequence_tokens(given, stop, expected):
    assert add_end_ids(given, stop, SPECIAL) == expected


class Generation(SimpleNamespace):
    def save_pretrained(self, folder):
        (folder / "generation_config.json").write_text(json.dumps(vars(self)))


def test_export_has_the_template_and_the_ends_of_training(tmp_path):
    import copy

    tokenizer, generation = copy.deepcopy(build_tokenizer()), Generation(eos_token_id=0)
    save_chat(tmp_path, tokenizer, generation, chat_template=FAMILIES["smollm2"], stop=["<|im_end|>"])
    assert (tmp_path / "chat_template.jinja").read_text() == FAMILIES["smollm2"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [0, end]
    assert generation.eos_token_id == 0, "the policy may be exported again"


def test_a_model_without_generation_config_or_template_gets_none(tmp_path):
    save_chat(tmp_path, build_tokenizer(), None, chat_template=None, stop=())
    assert not {"generation_config.json", "chat_template.jinja"} & {file.name for file in tmp_path.iterdir()}
