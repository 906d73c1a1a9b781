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


def _list_names(groups: Mapping[str, str]) -> dict[str, str]:
    return {name: value for value, names in groups.items() for name in names.split()}


_LEFT_OUT = _list_names(
    {
        _PROMPT: "chat_template documents truncate_prompt_tokens context_management continue_final_message "
        "add_generation_prompt",
        _SAMPLING: "logit_bias allowed_token_ids bad_words min_tokens ignore_eos stop_token_ids logits_processors "
        "thinking_token_budget structured_outputs guided_json guided_regex guided_choice guided_grammar "
        "response_format output_format text.format output_config.format",
        _SERVICE: "container mcp_servers web_search_options",
    }
)
"""Why a field is refused, unless agent.constraints is ignore."""
_REFUSED = _list_names(
    {
        "one request gets one answer; send one request per answer": "n best_of use_beam_search",
        "the gateway keeps no conversations; send the whole conversation": "previous_response_id conversation prompt",
        "the answer has the sampled tokens alone": "echo suffix prompt_logprobs background",
        "the policy reads and writes text": "audio prompt_embeds",
        "it is replaced by tools and tool_choice": "functions function_call",
    }
)
"""Why a field is refused always."""
_VARIABLES = _list_names(
    {
        "enable_thinking": "enable_thinking",
        "reasoning_effort": "reasoning_effort reasoning.effort output_config.effort",
    }
)
"""Fields that set a variable of the chat template, and its name."""
_WITH_PARTS = ("text", "output_config", "reasoning", "chat_template_kwargs")
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
            is_read, problem = path in dialect.reads, ""
            variables = {name: each for name, each in _find_variables(path, value).items() if self.has_variable(name)}
            if changed := [name for name, each in variables.items() if self.arguments.get(name) != each]:
                problem = f"{_PROMPT}; for all requests, spec.data.chatTemplateArguments sets {changed[0]}"
            elif not is_read and _asks(path, value):
                problem = _REFUSED.get(path) or _LEFT_OUT.get(path, "")
            if problem and (path in _REFUSED or not self.ignores):
                remedy = "remove it" if path in _REFUSED else "remove it, or set agent.constraints: ignore"
                raise refuse(path, f"not supported: {problem}; {remedy}", "unsupported_parameter")
            is_obeyed = is_read or variables or path in _REFUSED or path in _LEFT_OUT
            # Of the likeliest tokens, the sampled one alone is known.
            if problem or not is_obeyed or ("logprobs" in path and isinstance(value, int) and value > 1):
                ignored.add(path)
        kept = {name: value for name, value in body.items() if name in dialect.reads}
        if "tools" in dialect.reads:
            kept["tools"], left_out = choose_tools(body, ignores=self.ignores)
            ignored.update(left_out)
        return replace(dialect.read(kept, headers), ignored=tuple(sorted(ignored)))


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
