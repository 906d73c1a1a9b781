"""Chat templates in the environment that transformers documents for them, by jinja2 alone: rendered, and looked into.

Leaves tokens to tokenizer.py. Invariant: the text of a conversation is the one that transformers' tokenizers write for
the same template and arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rljob_api.errors import UserError
from rljob_inputs.machine.bounded import reading

if TYPE_CHECKING:
    from jinja2 import Environment, Template

ANSWER_SENTINEL = "RLJOB7SENTINEL"
"""Stands for an answer, to find what a template writes after it."""
_QUESTION = {"role": "user", "content": "?"}
_REASONING = {
    "<think>": "</think>",
    "</think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel>thought": "<channel|>",
    "<|channel|>analysis": "<|end|>",
}
"""Marks by which a template of a model that thinks is known, and how its reasoning ends: of Qwen, DeepSeek, GLM and
others; Magistral; Seed-OSS; Gemma 4; gpt-oss."""


class TemplateSource:
    """A template, and the special tokens that it may name."""

    def __init__(
        self, text: str, special_tokens: Mapping[str, str] | None = None, place: str = "the chat template"
    ) -> None:
        """`place`: for errors. Raise UserError if it is not a Jinja template."""
        self.text, self._special_tokens, self._place = text, dict(special_tokens or {}), place
        self._template  # noqa: B018 - compile it here

    def render(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        """Return the text of a conversation. Raises what the template raises."""
        own = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        with reading(self._place):
            return self._template.render({**self._special_tokens, **arguments, **own})

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads from outside."""
        from jinja2 import meta

        return frozenset(meta.find_undeclared_variables(self._environment.parse(self.text)))

    def can_think(self, arguments: Mapping[str, Any]) -> bool:
        """Whether an answer may begin with reasoning: the template knows reasoning, and does not close it in the
        prompt, as Qwen 3 does with enable_thinking: false."""
        ends = tuple(end for mark, end in _REASONING.items() if mark in self.text)
        prompt = self._try([_QUESTION], arguments, add_generation_prompt=True)
        return bool(ends) and not prompt.rstrip().endswith(ends)

    def find_tail(self, arguments: Mapping[str, Any]) -> str:
        """Return what the template writes after an answer that ends a conversation, without white space around it;
        empty if it refuses one."""
        answer = {"role": "assistant", "content": ANSWER_SENTINEL}
        text = self._try([_QUESTION, answer], arguments, add_generation_prompt=False)
        return text.rpartition(ANSWER_SENTINEL)[2].strip() if ANSWER_SENTINEL in text else ""

    def _try(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        try:
            return self.render(messages, arguments, add_generation_prompt=add_generation_prompt)
        except Exception:  # jinja2's own, and whatever the template raises; the job's prompts show whether it matters
            return ""

    @cached_property
    def _environment(self) -> Environment:
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _build_generation_extension()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        return environment

    @cached_property
    def _template(self) -> Template:
        import jinja2

        try:
            with reading(self._place):  # computes what is constant
                return self._environment.from_string(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"is not a Jinja template: line {error.lineno}: {error.message}") from error


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
