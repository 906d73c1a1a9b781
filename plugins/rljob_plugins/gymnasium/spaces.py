"""Which spaces of gymnasium have a text form, and the action that an answer means. Standard library only."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rljob_service.worker.environments.stepping import NotAnActionError

_OBSERVED: Final = ("Text", "Discrete", "Tuple", "Dict", "Sequence")
_NUMBER: Final = re.compile(r"-?\d+")


def find_action_problem(space: Any, labels: Sequence[str]) -> str:
    """Return why answers cannot be actions; empty if they can."""
    if type(space).__name__ not in ("Text", "Discrete"):
        return f"the action space {space} has no text form: only Text and Discrete have one; wrap the environment"
    if labels and len(labels) != getattr(space, "n", None):
        return f"{len(labels)} labels do not fit the action space {space}"
    return ""


def find_observation_problem(space: Any) -> str:
    """Return why observations cannot be messages; empty if they can."""
    if _has_text(space):
        return ""
    return (
        f"the observation space {space} has no text form: only {', '.join(_OBSERVED)} have one; set args.render_mode: "
        "ansi if the environment renders text, or wrap it"
    )


def _has_text(space: Any) -> bool:
    """Return whether a space, with all its parts, is among those that are shown."""
    if type(space).__name__ not in _OBSERVED:
        return False
    inner = getattr(space, "feature_space", None)
    parts = [inner] if inner is not None else getattr(space, "spaces", ())
    return all(map(_has_text, parts.values() if isinstance(parts, Mapping) else parts))


def show(observation: Any) -> str:
    """Return an observation as text: a str as it is, anything else as JSON."""
    return observation if isinstance(observation, str) else json.dumps(observation, default=_to_json)


def _to_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def read_action(space: Any, text: str, labels: Sequence[str]) -> Any:
    """Return the action of an answer. Raise NotAnActionError.

    Text: the answer as it is. Discrete: the last label in the answer, or without labels the last number, that is an
    action.
    """
    if type(space).__name__ == "Text":
        if space.contains(text):
            return text
        raise NotAnActionError(f"Reply with {space.min_length} to {space.max_length} characters of: {space.characters}")
    start, count = int(space.start), int(space.n)
    actions = _find_labels(text, labels, start) if labels else [int(each) for each in _NUMBER.findall(text)]
    valid = [action for action in actions if start <= action < start + count]
    if valid:
        return valid[-1]
    choices = f"of {', '.join(labels)}" if labels else f"number from {start} to {start + count - 1}"
    raise NotAnActionError(f"Reply with one {choices}.")


def _find_labels(text: str, labels: Sequence[str], start: int) -> list[int]:
    numbers = {label.lower(): start + index for index, label in enumerate(labels)}
    longest_first = sorted(map(re.escape, numbers), key=len, reverse=True)
    return [numbers[each] for each in re.findall(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", text.lower())]
