"""gymnasium: environments of text. The observation is the user's message, the text of the answer is the action.

Actions: Text, or Discrete by number or label. Observations: Text, Discrete, Tuple, Dict and Sequence of these as JSON,
or anything with render_mode ansi, whose rendering is shown. Other spaces are refused. Standard library only.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from rljob_api.errors import UserError
from rljob_reward.worker.environments.base import Answer, Model
from rljob_reward.worker.environments.model import text_of
from rljob_reward.worker.environments.stepping import Step, append_text, play_steps, row_of, seed_of
from rljob_reward.worker.episodes.types import Episode, Reply

OPTIONS: Final = "rljob"
"""The entry of args that is not for the constructor: labels, invalid_reward."""
_SHOWN: Final = ("Text", "Discrete", "Tuple", "Dict", "Sequence")
_NUMBER: Final = re.compile(r"-?\d+")


class TextEnvironment(NamedTuple):
    make: Callable[[], Any]
    labels: Sequence[str] = ()
    """Names of the actions of a Discrete space, from its first number."""
    invalid_reward: float = 0.0
    """Of an answer that is not an action."""


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
    """Create the environment once, so that a space without a text form fails at the start."""
    given = {key: value for key, value in args.items() if key != OPTIONS}
    environment = TextEnvironment(lambda: make(**given), **args.get(OPTIONS, {}))
    made = environment.make()
    try:
        space = made.action_space
        if type(space).__name__ not in ("Text", "Discrete"):
            raise UserError(f"the action space {space} has no text form; only Text and Discrete have; wrap it")
        if environment.labels and len(environment.labels) != getattr(space, "n", None):
            raise UserError(f"args.{OPTIONS}.labels has {len(environment.labels)} names; the action space is {space}")
        if not _is_shown_as_ansi(made) and not _is_shown(made.observation_space):
            raise UserError(
                f"the observation space {made.observation_space} has no text form; only {', '.join(_SHOWN)} have; set "
                "args.render_mode: ansi if the environment renders text, or wrap it"
            )
    finally:
        made.close()
    return environment


def _is_shown(space: Any) -> bool:
    inner = getattr(space, "feature_space", None) or getattr(space, "spaces", ())
    parts = inner.values() if isinstance(inner, Mapping) else inner if isinstance(inner, (tuple, list)) else [inner]
    return type(space).__name__ in _SHOWN and all(_is_shown(part) for part in parts if inner)


def _is_shown_as_ansi(made: Any) -> bool:
    return getattr(made, "render_mode", None) == "ansi"


async def play(environment: TextEnvironment, episode: Episode, model: Model) -> Reply:
    made = environment.make()
    try:
        observation, info = made.reset(seed=seed_of(episode), options={"row": row_of(episode)})
        last = dict(info)

        def take(answer: Answer) -> Step:
            text = text_of(answer.message)
            try:
                action = read_action(made.action_space, text, environment.labels)
            except ValueError as error:
                return Step([{"role": "user", "content": str(error)}], environment.invalid_reward)
            seen, reward, terminated, truncated, info = made.step(action)
            last.update(info)
            return Step([{"role": "user", "content": _show(made, seen)}], reward, bool(terminated or truncated))

        played = await play_steps(episode, model, append_text(episode.prompt, _show(made, observation)), take)
    finally:
        made.close()
    return Reply(rewards=played.rewards, state={"end": played.end, "turns": played.num_turns}, info=last)


def read_action(space: Any, text: str, labels: Sequence[str]) -> Any:
    """Return the action of an answer. Raise ValueError with a message for the policy.

    Text: the answer as it is. Discrete: the last label or number in the answer that is an action.
    """
    if type(space).__name__ == "Text":
        if space.contains(text):
            return text
        raise ValueError(f"Reply with {space.min_length} to {space.max_length} characters of: {space.characters}")
    names = {label.lower(): number for number, label in enumerate(labels)}
    pattern = "|".join(rf"\b{re.escape(name)}\b" for name in sorted(names, key=len, reverse=True))
    found = re.findall(pattern, text.lower()) if names else _NUMBER.findall(text)
    start, count = int(space.start), int(space.n)
    actions = [names[each] + start if names else int(each) for each in found]
    valid = [action for action in actions if start <= action < start + count]
    if valid:
        return valid[-1]
    choices = ", ".join(labels) if labels else f"the numbers {start} to {start + count - 1}"
    raise ValueError(f"Reply with one of {choices}.")


def _show(made: Any, observation: Any) -> str:
    if _is_shown_as_ansi(made):
        return str(made.render())
    return observation if isinstance(observation, str) else json.dumps(observation, default=_to_json)


def _to_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
