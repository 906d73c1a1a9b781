"""OpenRLHF: reward_func(queries, prompts, labels, **kwargs).

A query is the prompt's text and the completion. Returns a dict with "rewards" (and "scores", "extra_logs", which become
components), or only the rewards as a tensor, array or list. A group is one batch; so is a single sample, and its reward
may be a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljob_reward.worker.adapters import outcome
from rljob_reward.worker.adapters.binding import Adapter, Binding, Sample, call_by_name
from rljob_reward.worker.adapters.outcome import BAD_RETURN, Outcome, describe, invalid

_EXPECTED = "reward_func(queries, prompts, labels, **kwargs)"
_EXPECTED_RETURN = 'a dict with "rewards", or the rewards as a tensor or list, one for each query'
_PARAMETERS = ("queries", "prompts", "labels")


def bind(function: Callable[..., Any], kwargs: dict[str, Any], place: str) -> Binding:
    call = call_by_name(function, _PARAMETERS, kwargs, place, expected=_EXPECTED, marker="queries")
    return Binding(lambda samples: call(_columns_of(samples)), lambda value, samples: read(value, len(samples)))


def _columns_of(samples: list[Sample]) -> tuple[list[Any], ...]:
    """Return OpenRLHF's arguments for a batch, in the order of the parameters."""
    prompts = [_text(sample["prompt"]) for sample in samples]
    queries = [prompt + sample["completion"] for prompt, sample in zip(prompts, samples, strict=True)]
    return queries, prompts, [sample.get("ground_truth") for sample in samples]


def _text(prompt: str | list[dict[str, Any]]) -> str:
    """Return the prompt as text. OpenRLHF applies the trainer's chat template; here a chat is its contents as lines."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{message.get('content') or ''}\n" for message in prompt)


def read(value: Any, num_samples: int) -> list[Outcome]:
    rewards = value
    extras: dict[Any, Any] = {}
    if isinstance(value, dict):
        if "rewards" not in value:
            keys = ", ".join(map(str, value)) or "none"
            return [invalid(BAD_RETURN, f'the function returned a dict without "rewards" (its keys: {keys})')]
        logs = value["extra_logs"] if isinstance(value.get("extra_logs"), dict) else {}
        extras = logs | {key: value[key] for key in ("scores",) if key in value}
        rewards = value["rewards"]
    scores = _elements(rewards, num_samples)
    if scores is None:
        got = f"{describe(rewards)} for {num_samples} {'query' if num_samples == 1 else 'queries'}"
        return [invalid(BAD_RETURN, f"the function returned {got}; expected {_EXPECTED_RETURN}")]
    columns = {key: _elements(extra, num_samples) or [extra] * num_samples for key, extra in extras.items()}
    return [
        outcome.read_score(score, ((key, column[i]) for key, column in columns.items()), _EXPECTED_RETURN)
        for i, score in enumerate(scores)
    ]


def _elements(value: Any, num_samples: int) -> list[Any] | None:
    """Return one element per sample: also of None, and of the number that a single sample may have."""
    if value is None or (num_samples == 1 and outcome.read_number(value) is not None):
        return [value] * num_samples
    return outcome.elements_of(value, num_samples)


ADAPTER = Adapter("openrlhf", "queries", True, bind)
