"""A tokenizer with its chat template: messages to text, text to token ids and back.

Leaves the conversation to conversation.py. Invariant: without tools, the ids of `encode(render(messages))` are those of
`rljob_inputs.data.prompts.tokenize` for the same messages, tokenizer and arguments.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

from rljob_api.errors import UserError
from rljob_api.wire.base import Message
from rljob_api.wire.calls import ToolSchema
from rljob_inputs.models.chat_template import ANSWER_SENTINEL
from rljob_trainer.conversation.tool_calls import CALL_END, CALL_START, ToolFormat, find_format

_PROBE_NAME = "rljob_probe"
_PROBE = [
    {
        "type": "function",
        "function": {
            "name": _PROBE_NAME,
            "description": "?",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
]
"""A tool that shows whether the template writes tools."""
_QUESTION = {"role": "user", "content": "?"}


class TemplateError(UserError):
    """The chat template refuses these messages."""


class ChatTemplate:
    def __init__(
        self,
        tokenizer: Any,
        tool_format: ToolFormat | Literal["auto"] = "auto",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """`tokenizer`: of transformers. `arguments`: data.chatTemplateArguments. Raise TemplateError if it has no chat
        template."""
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                "spec.agent: the model has no chat template, which conversations need; "
                "use an instruction-tuned model, or set model.chatTemplate or agent.type: singleTurn"
            )
        self._tokenizer, self.arguments = tokenizer, dict(arguments or {})
        self._given_format = tool_format
        self._special: dict[int, bool] = {}

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, generate: bool) -> str:
        """Return the text of a conversation. `generate`: with the header after which the policy answers.

        If the template does not write tools, they are in the system message. Raise TemplateError.
        """
        described = [{"type": "function", "function": tool.model_dump()} for tool in tools]
        parsed = [_with_parsed_arguments(message) for message in messages]
        if described and not self._writes_tools:
            return self._render(write_tools(parsed, described, self.tool_format), None, generate=generate)
        return self._render(parsed, described or None, generate=generate)

    def _render(self, messages: list[Message], tools: list[dict[str, Any]] | None, *, generate: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=generate, tokenize=False, **self.arguments
            )
        except Exception as error:  # jinja2's own, and whatever the template raises
            roles = ", ".join(str(message.get("role")) for message in messages[-8:])
            raise TemplateError(
                f"the chat template fails for messages that end with the roles {roles}: {type(error).__name__}: {error}"
            ) from error
        # Half a surrogate pair, which JSON can have and no tokenizer takes.
        return text.encode(errors="replace").decode()

    def encode(self, text: str) -> list[int]:
        """Return token ids. Special tokens in the text are recognized; none are added."""
        return [int(token_id) for token_id in self._tokenizer([text], add_special_tokens=False)["input_ids"][0]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text, with special tokens."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of the text of a completion."""
        if token_id not in self._special:
            is_empty = not self._tokenizer.decode([token_id], skip_special_tokens=True)
            self._special[token_id] = is_empty and bool(self.decode([token_id]))
        return self._special[token_id]

    @cached_property
    def end_token(self) -> int | None:
        """The token with which the template ends an answer: what the model would sample there. None: text ends it."""
        try:
            text = self._render([_QUESTION, {"role": "assistant", "content": ANSWER_SENTINEL}], None, generate=False)
        except TemplateError:
            return None
        tail = self.encode(text.rpartition(ANSWER_SENTINEL)[2].lstrip())
        return tail[0] if tail and self.is_special(tail[0]) else None

    @cached_property
    def num_tokens(self) -> int:
        """Ids are less than this."""
        return len(self._tokenizer)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls. UserError if that is unknown."""
        if self._given_format != "auto":
            return self._given_format
        return find_format(self._tokenizer.get_chat_template(tools=_PROBE)) if self._writes_tools else "hermes"

    @cached_property
    def has_reasoning(self) -> bool:
        """Whether the template treats <think>...</think> in an answer as reasoning. If it does not, it is content."""
        return "</think>" in self._tokenizer.get_chat_template(tools=_PROBE)

    def has_variable(self, name: str) -> bool:
        """Whether the template reads a variable, such as enable_thinking."""
        return bool(re.search(rf"\b{re.escape(name)}\b", self._tokenizer.get_chat_template(tools=_PROBE)))

    @cached_property
    def _writes_tools(self) -> bool:
        try:
            text = self._render([_QUESTION], _PROBE, generate=True)
        except TemplateError:
            return True  # It refuses this message; the tools of the conversation are not lost without an error.
        return _PROBE_NAME in text


def _with_parsed_arguments(message: Message) -> Message:
    """Return the message with arguments as objects: templates print them as JSON, and OpenAI's API has them as text."""
    calls = message.get("tool_calls")
    if not calls or not any(isinstance(call.get("function", {}).get("arguments"), str) for call in calls):
        return message
    return {**message, "tool_calls": [_parse_arguments(call) for call in calls]}


def _parse_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


_HERMES = f"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
%s
</tools>

For each function call, return a json object with function name and arguments within {CALL_START}{CALL_END} XML tags:
{CALL_START}
{{"name": <function-name>, "arguments": <args-json-object>}}
{CALL_END}"""
_LLAMA3 = """You have access to the following functions. To call a function, please respond with JSON for a function \
call.
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. \
Do not use variables.

%s"""


def write_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]], tool_format: ToolFormat) -> list[Message]:
    """Return the messages without calls and without the role `tool`: both are text. `tools`: as OpenAI's API has them,

    For chat templates that do not write tools, such as SmolLM2's. The wording is that of the templates of Qwen 2.5 and
    Llama 3, which the models of both formats have seen.
    """
    wording = _HERMES if tool_format == "hermes" else _LLAMA3
    section = wording.replace("%s", "\n".join(map(_to_json, tools)))
    plain = _write_results([_write_calls(message, tool_format) for message in messages])
    if plain and plain[0].get("role") == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{section}"}, *plain[1:]]
    return [{"role": "system", "content": section}, *plain]


def _write_calls(message: Message, tool_format: ToolFormat) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [_write_call(call["function"], tool_format) for call in calls]
    separator = "\n" if tool_format == "hermes" else "; "
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, [message.get("content"), separator.join(written)]))}


def _write_call(function: dict[str, Any], tool_format: ToolFormat) -> str:
    name, arguments = function["name"], function.get("arguments")
    if tool_format == "llama3":
        return _to_json({"name": name, "parameters": arguments})
    return f"{CALL_START}\n{_to_json({'name': name, 'arguments': arguments})}\n{CALL_END}"


def _write_results(messages: list[Message]) -> list[Message]:
    """Join the results that follow one answer to a message of the user: many templates require that roles alternate."""
    written: list[Message] = []
    for is_result, group in groupby(messages, key=lambda message: message.get("role") == "tool"):
        if is_result:
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            written.append({"role": "user", "content": "\n".join(results)})
        else:
            written += group
    return written


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
