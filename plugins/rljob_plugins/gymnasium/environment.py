"""gymnasium: environments of text. The observation is the user's message, the text of the answer is the action.

Which spaces are supported is in spaces. With render_mode ansi the rendering is shown, whatever the observation
space. Other environments are refused at the start. Standard library only.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from rljob_api.errors import UserError
from rljob_plugins.gymnasium.spaces import (
    find_action_problem,
    find_observation_problem,
    read_action,
    show,
)
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
    return str(made.render()).strip("\n") if _is_rendered(made) else show(observation)
