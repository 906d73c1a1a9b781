"""What a field of a request means for the policy, said once for all APIs. Pure.

    a dialect reads it              obeyed
    a variable of the template      obeyed if the job's has this value, or the template does not read it
    the prompt, the sampling        refused: the policy trains on the job's; agent.constraints: ignore leaves it out
    another answer                  refused: the gateway has no such answer
    any other                       accepted, and without effect

The response names what has no effect. Invariant: a dialect gets the fields that it reads, with tools that the policy
may call, and without tool_choice.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rljob_trainer.gateway.dialects.fields import read_list, read_object, refuse
from rljob_trainer.gateway.dialects.tools import choose_tools
from rljob_trainer.gateway.types import Dialect, ModelRequest

_PROMPT = "it changes the prompt, which is that of the job's chat template"
_SAMPLING = "it changes which tokens can be sampled, and the policy trains on the job's sampling"
_SERVICE = "the gateway has no such service"
_LEFT_OUT = {
    **dict.fromkeys(("chat_template", "documents", "truncate_prompt_tokens", "context_management"), _PROMPT),
    **dict.fromkeys(("continue_final_message", "add_generation_prompt"), _PROMPT),
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "ignore_eos"), _SAMPLING),
    **dict.fromkeys(("stop_token_ids", "thinking_token_budget", "logits_processors", "guided_grammar"), _SAMPLING),
    **dict.fromkeys(("response_format", "output_format", "text.format", "output_config.format"), _SAMPLING),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice"), _SAMPLING),
    **dict.fromkeys(("container", "mcp_servers", "web_search_options"), _SERVICE),
}
"""Why a field is refused, unless agent.constraints is ignore."""
_ONE_ANSWER = "one request gets one answer; send one request per answer"
_SEND_ALL = "the gateway keeps no conversations; send the whole conversation"
_SAMPLED_ALONE = "the answer has the sampled tokens alone"
_REFUSED = {
    **dict.fromkeys(("n", "best_of", "use_beam_search"), _ONE_ANSWER),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), _SEND_ALL),
    **dict.fromkeys(("echo", "suffix", "prompt_logprobs", "background"), _SAMPLED_ALONE),
    **dict.fromkeys(("audio", "prompt_embeds"), "the policy reads and writes text"),
    "functions": "it is replaced by tools",
    "function_call": "it is replaced by tool_choice",
}
"""Why a field is refused always."""
_VARIABLES = {
    "enable_thinking": "enable_thinking",
    **dict.fromkeys(("reasoning_effort", "reasoning.effort", "output_config.effort"), "reasoning_effort"),
}
"""Fields that set a variable of the chat template, and its name."""
_WITH_PARTS = ("text", "output_config", "reasoning", "chat_template_kwargs")
_NUMBER_OF_LIKELIEST = ("logprobs", "top_logprobs")
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {}, {"type": "text"})
"""Values of a refused field that ask for nothing."""


@dataclass(frozen=True)
class Rules:
    """The rules of a job."""

    ignores: bool = False
    """Whether agent.constraints is ignore."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """data.chatTemplateArguments."""
    has_variable: Callable[[str], bool] = lambda name: False
    """Whether the chat template reads a variable."""

    def read(self, dialect: Dialect, body: Mapping[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        """Raise RequestError for what cannot be answered."""
        ignored: set[str] = set()
        for path, value in _list_fields(body):
            problem, is_final = self._find_problem(path, value, is_read=path in dialect.reads)
            if problem and (is_final or not self.ignores):
                remedy = "remove it" if is_final else "remove it, or set agent.constraints: ignore"
                raise refuse(path, f"not supported: {problem}; {remedy}", "unsupported_parameter")
            if problem or self._has_no_effect(path, value, is_read=path in dialect.reads):
                ignored.add(path)
        kept = {name: value for name, value in body.items() if name in dialect.reads}
        if "tools" in dialect.reads:
            kept["tools"], left_out = choose_tools(body, ignores=self.ignores)
            ignored.update(left_out)
        return replace(dialect.read(kept, headers), ignored=tuple(sorted(ignored)))

    def _find_problem(self, path: str, value: Any, *, is_read: bool) -> tuple[str, bool]:
        """Return why a field cannot be obeyed, and whether it is refused always. Empty: it can, or has no effect."""
        for name, wanted in _find_variables(path, value).items():
            if self.has_variable(name) and self.arguments.get(name) != wanted:
                return f"{_PROMPT}; for all requests, spec.data.chatTemplateArguments sets {name}", False
        if is_read or not _asks(path, value):
            return "", False
        return (_REFUSED[path], True) if path in _REFUSED else (_LEFT_OUT.get(path, ""), False)

    def _has_no_effect(self, path: str, value: Any, *, is_read: bool) -> bool:
        if is_read:  # of the likeliest tokens, the sampled one alone is known
            return path in _NUMBER_OF_LIKELIEST and isinstance(value, int) and value > 1
        if path in _REFUSED or path in _LEFT_OUT:
            return False
        return not any(map(self.has_variable, _find_variables(path, value)))


def _list_fields(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of what is given, in order; tools are those of choose_tools."""
    for name in sorted(body.keys() - {"tools", "tool_choice"}):
        value = body[name]
        if name in _WITH_PARTS and isinstance(value, dict):
            yield from ((f"{name}.{part}", value[part]) for part in sorted(value) if value[part] is not None)
        elif value is not None:
            yield name, value


def _find_variables(path: str, value: Any) -> dict[str, Any]:
    """Return the variables of chat templates that a field sets."""
    if path == "thinking":
        is_off = isinstance(value, dict) and value.get("type") == "disabled"
        return {"enable_thinking": False, "thinking": False} if is_off else {}
    group, _, name = path.partition(".")
    name = name if group == "chat_template_kwargs" else _VARIABLES.get(path, "")
    return {name: value} if name else {}


def _asks(path: str, value: Any) -> bool:
    """Whether a field asks for anything else than what the gateway does."""
    if path in ("n", "best_of"):
        return value != 1
    if path == "add_generation_prompt":
        return value is False
    if path == "context_management" and isinstance(value, dict):
        edits = read_list(value.get("edits"), "context_management.edits")
        return any(read_object(edit, f"{path}.edits").get("keep") != "all" for edit in edits)
    return value not in _NOTHING
