"""What a reward function of OpenRLHF returns: a dict with `rewards`, `scores` and `extra_logs`, or only the rewards."""

from typing import Any

from rljob_service.worker.forms.outcome import (
    BAD_RETURN,
    Outcome,
    describe,
    elements_of,
    invalid,
    read_number,
    read_score,
)

_EXPECTED = 'a dict with "rewards", or the rewards as a tensor or list, one for each query'


def read_rewards(value: Any, num_samples: int) -> list[Outcome]:
    """Read the whole result. A single sample's reward may be a number."""
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
        return [invalid(BAD_RETURN, f"the function returned {got}; expected {_EXPECTED}")]
    columns = {key: _elements(extra, num_samples) or [extra] * num_samples for key, extra in extras.items()}
    return [
        read_score(score, ((key, column[i]) for key, column in columns.items()), _EXPECTED)
        for i, score in enumerate(scores)
    ]


def _elements(value: Any, num_samples: int) -> list[Any] | None:
    """Return one element per sample: also of None, and of the number that a single sample may have."""
    if value is None or (num_samples == 1 and read_number(value) is not None):
        return [value] * num_samples
    return elements_of(value, num_samples)
