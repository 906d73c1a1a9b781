"""A tokenizer without transformers, for checks: tokenizer.json by the `tokenizers` library, chat templates by jinja2.

Has the part of transformers' interface that prompts need. Invariant: equal token ids for models with a tokenizer.json;
others have no such tokenizer, and the trainer alone measures their prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rljob_api.errors import UserError
from rljob_inputs.machine.bounded import reading
from rljob_inputs.machine.installation import has_module
from rljob_inputs.models.chat_template import TemplateSource
from rljob_inputs.models.files import ModelFiles

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONFIG_FILE, _TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
_DEFAULT_TEMPLATE = "default"
"""Name of the template that is used, in a list of templates."""


class LightTokenizer:
    def __init__(self, tokenizer: Tokenizer, chat_template: str | None, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: text by name, such as eos_token."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self.chat_template = chat_template

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, text: Sequence[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        encodings = self._tokenizer.encode_batch(list(text), add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **arguments: Any,
    ) -> str:
        """Return the text of a conversation. `tokenize` must be false."""
        assert not tokenize
        return self._template.render(messages, arguments, add_generation_prompt=add_generation_prompt)

    def encode_answer(self, text: str, arguments: Mapping[str, Any], *, is_chat: bool) -> list[int]:
        """Return the ids of an answer as a rollout has them, with the token that ends it: the one that the template
        writes after an answer with `arguments`, or without a chat eos_token."""
        tail = self._template.find_tail(arguments) if is_chat else self._special_tokens.get("eos_token", "")
        answer, end = self([text, tail], add_special_tokens=False)["input_ids"]
        special = {number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return [*answer, *(token_id for token_id in end[:1] if token_id in special)]

    @cached_property
    def _template(self) -> TemplateSource:
        return TemplateSource(self.chat_template or "", self._special_tokens)


def load_tokenizer(files: ModelFiles, chat_template: str | None = None) -> LightTokenizer | None:
    """Return the tokenizer; None if it needs transformers, or the extra data, which is not installed. `chat_template`:
    in place of the model's. Raise UserError if a file is broken."""
    if "tokenizer.json" not in files.sizes or not has_module("tokenizers"):
        return None
    from tokenizers import Tokenizer

    try:
        with reading(f"{files.place}/tokenizer.json"):
            tokenizer = Tokenizer.from_file(str(files.fetch("tokenizer.json")))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{files.place}/tokenizer.json cannot be read: {error}") from error
    return LightTokenizer(tokenizer, chat_template or read_template(files)[0], read_special_tokens(files))


def read_template(files: ModelFiles) -> tuple[str | None, str]:
    """Return the model's chat template, and the file that has it."""
    if _TEMPLATE_FILE in files.sizes:
        return files.fetch(_TEMPLATE_FILE).read_text(encoding="utf-8"), _TEMPLATE_FILE
    template = files.read_json(_CONFIG_FILE).get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get(_DEFAULT_TEMPLATE)
    return (template, _CONFIG_FILE) if isinstance(template, str) else (None, "")


def read_special_tokens(files: ModelFiles) -> dict[str, str]:
    """Return the texts of special tokens by name, such as eos_token."""
    config = {**files.read_json("special_tokens_map.json"), **files.read_json(_CONFIG_FILE)}
    return {name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}


def read_special_ids(files: ModelFiles) -> dict[str, int]:
    """Return the ids of special tokens by text. Raise UserError if a file is broken."""
    added = files.read_json("tokenizer.json").get("added_tokens")
    if not isinstance(added, list):
        decoder = files.read_json(_CONFIG_FILE).get("added_tokens_decoder")
        entries = decoder.items() if isinstance(decoder, dict) else []
        added = [{**entry, "id": int(number)} for number, entry in entries if number.isdecimal()]
    return {entry["content"]: entry["id"] for entry in added if entry.get("special")}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)
