"""OpenRLHF: reward_func(queries, prompts, labels, **kwargs).

A query is the prompt's text and the completion. Returns a dict with "rewards" (and "scores", "extra_logs", which
become components), or the rewards alone as a tensor, array, list or number. Everything is a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljob_reward.adapters.outcome import BAD_RETURN, Outcome, describe, invalid, read_number, read_score
from rljob_reward.adapters.signature import Parameters

NAME = "openrlhf"
MARKER = "queries"
_EXPECTED = "reward_func(queries, prompts, labels, **kwargs)"
_EXPECTED_RETURN = 'a dict with "rewards", or one reward as a tensor, list or number'
_PARAMETERS = ("queries", "prompts", "labels")


def bind(
    function: Callable[..., Any], kwargs: dict[str, Any], place: str
) -> tuple[Callable[[dict[str, Any]], Any], Callable[[Any], Outcome]]:
    parameters = Parameters(function, place)
    parameters.check({*_PARAMETERS, *kwargs}, _EXPECTED, needs=MARKER)
    parameters.check_kwargs(kwargs)
    taken = frozenset(name for name in _PARAMETERS if parameters.accepts(name))

    def call(request: dict[str, Any]) -> Any:
        prompt = _text(request["prompt"])
        values = {
            "queries": [prompt + request["completion"]],
            "prompts": [prompt],
            "labels": [request.get("ground_truth")],
        }
        return function(**{**{name: values[name] for name in taken}, **kwargs})

    return call, read


def _text(prompt: str | list[dict[str, Any]]) -> str:
    """OpenRLHF hands out templated text. The template is the trainer's, so a chat is its contents, line by line."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{message.get('content') or ''}\n" for message in prompt)


def read(value: Any) -> Outcome:
    if not isinstance(value, dict):
        return read_score(_only(value), (), _EXPECTED_RETURN)
    if "rewards" not in value:
        keys = ", ".join(map(str, value)) or "none"
        return invalid(BAD_RETURN, f'the function returned a dict without "rewards" (its keys: {keys})')
    logs = value.get("extra_logs")
    extras = {**(logs if isinstance(logs, dict) else {}), **({"scores": value["scores"]} if "scores" in value else {})}
    return read_score(_only(value["rewards"]), ((key, _only(extra)) for key, extra in extras.items()), _EXPECTED_RETURN)


def _only(value: Any) -> Any:
    """The element of a batch of one; anything else as it is, for read_score to judge."""
    if value is None or read_number(value) is not None or isinstance(value, (str, bytes, dict)):
        return value
    try:
        items = list(value)
    except TypeError:
        return value
    return items[0] if len(items) == 1 else f"{len(items)} rewards for 1 query: {describe(value)}"
