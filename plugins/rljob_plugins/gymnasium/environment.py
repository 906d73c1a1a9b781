"""gymnasium: environments of text. The observation is the user's message, the text of the answer is the action.

Spaces have a text form, or the environment is refused at the start. With render_mode ansi the rendering is shown,
whatever the observation space. Standard library only.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from rljob_api.errors import UserError
from rljob_service.worker.environments.base import Answer, Model
from rljob_service.worker.environments.model import text_of
from rljob_service.worker.environments.stepping import (
    NotAnActionError,
    Step,
    append_text,
    list_seeds,
    play_steps,
    row_of,
    seed_of,
)
from rljob_service.worker.episodes.types import Episode, Reply

OPTIONS: Final = "rljob"
"""The entry of args that is for this adapter: labels, invalid_reward."""
_OBSERVED: Final = ("Text", "Discrete", "Tuple", "Dict", "Sequence")
"""The spaces of observations that have a text form."""
_NUMBER: Final = re.compile(r"-?\d+")


class TextEnvironment(NamedTuple):
    make: Callable[[], Any]
    labels: Sequence[str] = ()
    """Names of the actions of a Discrete space, from its first number."""
    invalid_reward: float = 0.0
    """Reward of an answer that is not an action."""


def load(id: str, args: dict[str, Any]) -> TextEnvironment:
    import gymnasium

    try:
        gymnasium.spec(id)
    except gymnasium.error.Error as error:
        raise UserError(f"agent.environment.id: {error}; name the class of another one as MODULE:NAME") from error
    return _check(lambda **given: gymnasium.make(id, **given), args)


def adopt(value: Any, args: dict[str, Any]) -> TextEnvironment:
    if not callable(value):
        raise UserError(f"{value!r} is not a class or a function that returns an environment of gymnasium")
    return _check(value, args)


def is_environment(name: str, value: Any) -> bool:
    return inspect.isclass(value) and all(callable(getattr(value, method, None)) for method in ("reset", "step"))


def _check(make: Callable[..., Any], args: dict[str, Any]) -> TextEnvironment:
    """Create the environment once, so that one without a text form fails at the start."""
    given = {key: value for key, value in args.items() if key != OPTIONS}
    options = args.get(OPTIONS, {})
    if unknown := [key for key in options if key not in TextEnvironment._fields[1:]]:
        known = ", ".join(TextEnvironment._fields[1:])
        raise UserError(f"agent.environment.args.{OPTIONS}: unknown key {unknown[0]}; its keys may be {known}")
    environment = TextEnvironment(lambda: make(**given), **options)
    made = environment.make()
    try:
        problem = find_action_problem(made.action_space, environment.labels)
        if not problem and not _is_rendered(made):
            problem = find_observation_problem(made.observation_space)
    finally:
        made.close()
    if problem:
        raise UserError(f"agent.environment: {problem}")
    return environment


def _is_rendered(made: Any) -> bool:
    return getattr(made, "render_mode", None) == "ansi"


def rows(environment: TextEnvironment, split: str) -> Iterator[dict[str, Any]]:
    """Return one row for each seed of `reset`."""
    return list_seeds(split)


async def play(environment: TextEnvironment, episode: Episode, model: Model) -> Reply:
    made = environment.make()
    try:
        observation, info = made.reset(seed=seed_of(episode), options={"row": row_of(episode)})
        last = dict(info)

        def take(answer: Answer) -> Step:
            try:
                action = read_action(made.action_space, text_of(answer.message), environment.labels)
            except NotAnActionError as error:
                return Step([{"role": "user", "content": str(error)}], environment.invalid_reward)
            seen, reward, terminated, truncated, info = made.step(action)
            last.update(info)
            return Step([{"role": "user", "content": _show(made, seen)}], reward, bool(terminated or truncated))

        played = await play_steps(episode, model, append_text(episode.prompt, _show(made, observation)), take)
    finally:
        made.close()
    return Reply(rewards=played.rewards, state={"end": played.end, "turns": played.num_turns}, info=last)


def _show(made: Any, observation: Any) -> str:
    """Return what the environment renders, or else the observation: a str as it is, anything else as JSON."""
    if _is_rendered(made):
        return str(made.render()).strip("\n")
    return observation if isinstance(observation, str) else json.dumps(observation, default=_to_json)


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
