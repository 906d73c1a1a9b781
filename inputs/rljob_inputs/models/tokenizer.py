"""A tokenizer without transformers, for checks: tokenizer.json by the `tokenizers` library, chat templates by jinja2.

Has the part of transformers' interface that prompts need. Invariant: equal token ids for models with a tokenizer.json;
others have no such tokenizer, and the trainer alone measures their prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rljob_api.errors import UserError
from rljob_inputs.models.files import ModelFiles

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT_TEMPLATE = "default"
"""Name of the template that is used, in a list of templates."""


class LightTokenizer:
    def __init__(self, tokenizer: Tokenizer, chat_template: str | None, special_tokens: Mapping[str, str]) -> None:
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

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """Return the text of a conversation. `tokenize` must be false."""
        assert not tokenize
        return self._template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
        )

    @cached_property
    def _template(self) -> Template:
        """The template in the environment that transformers documents for it."""
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _build_generation_extension()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        return environment.from_string(self.chat_template or "")


def load_tokenizer(files: ModelFiles) -> LightTokenizer | None:
    """Return the tokenizer; None if it needs transformers. Raise UserError if a file is broken."""
    if "tokenizer.json" not in files.sizes:
        return None
    from tokenizers import Tokenizer

    config = {**files.read_json("special_tokens_map.json"), **files.read_json("tokenizer_config.json")}
    try:
        tokenizer = Tokenizer.from_file(str(files.fetch("tokenizer.json")))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{files.place}/tokenizer.json cannot be read: {error}") from error
    special = {name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
    return LightTokenizer(tokenizer, _read_template(files, config), special)


def _read_template(files: ModelFiles, config: Mapping[str, Any]) -> str | None:
    if "chat_template.jinja" in files.sizes:
        return files.fetch("chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get(_DEFAULT_TEMPLATE)
    return template if isinstance(template, str) else None


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _build_generation_extension() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationExtension(Extension):
        """Renders `{% generation %}` blocks, which mark what an assistant wrote, as their content."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return GenerationExtension


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.exceptions.TemplateError(message)
