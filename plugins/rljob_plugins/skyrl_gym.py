"""SkyRL-Gym: classes with init, step and close, in the form of BaseTextEnv.

As SkyRL does, the class gets `env_config`, here the job's args, and `extras`, here the row. Standard library only.
"""

import inspect
from collections.abc import Callable
from typing import Any

from rljob_api.errors import UserError
from rljob_service.worker.environments.base import Answer, Model
from rljob_service.worker.environments.model import text_of
from rljob_service.worker.environments.stepping import Step, play_steps, row_of
from rljob_service.worker.episodes.types import Episode, Reply

_METHODS = ("init", "step", "close")
Make = Callable[[dict[str, Any]], Any]
"""From `extras` to an environment."""


class Config(dict[str, Any]):
    """env_config: its entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"agent.environment.args has no {name}")
        value = self[name]
        return Config(value) if isinstance(value, dict) else value


def load(id: str, args: dict[str, Any]) -> Make:
    import skyrl_gym

    if id not in skyrl_gym.registry:
        known = ", ".join(sorted(skyrl_gym.registry))
        raise UserError(
            f"agent.environment.id: SkyRL-Gym has no environment {id}, only {known}; name the class of another one as "
            "MODULE:NAME"
        )
    return lambda extras: skyrl_gym.make(id, env_config=Config(args), extras=extras)


def adopt(value: Any, args: dict[str, Any]) -> Make:
    if not callable(value) or (inspect.isclass(value) and not _is_class(value)):
        raise UserError(f"{value!r} is not an environment of SkyRL-Gym: it must be a class with {', '.join(_METHODS)}")
    return lambda extras: value(env_config=Config(args), extras=extras)


def is_environment(name: str, value: Any) -> bool:
    return inspect.isclass(value) and _is_class(value)


def _is_class(value: type) -> bool:
    return all(callable(getattr(value, method, None)) for method in _METHODS)


async def play(environment: Make, episode: Episode, model: Model) -> Reply:
    made = environment(extras_of(episode))
    try:
        messages, info = made.init([dict(message) for message in episode.prompt])
        metadata: dict[str, Any] = {}

        def take(answer: Answer) -> Step:
            out = made.step(text_of(answer.message))
            metadata.update(out.get("metadata") or {})
            changed = out.get("postprocessed_action")
            shown = None if changed is None else {"role": "assistant", "content": changed}
            return Step(out["observations"] or [], out["reward"], bool(out["done"]), shown)

        played = await play_steps(episode, model, messages, take)
        metrics = made.get_metrics() if hasattr(made, "get_metrics") else {}
    finally:
        made.close()
    state = {"end": played.end, "turns": played.num_turns}
    return Reply(rewards=played.rewards, state=state, info={**(info or {}), **metadata, **metrics})


def extras_of(episode: Episode) -> dict[str, Any]:
    """Return the row as SkyRL's generator passes it: the columns besides the prompt, and max_turns.

    Without a column reward_spec (reward_model, in older environments) both have the answer.
    """
    row = {key: value for key, value in row_of(episode).items() if key != "prompt"}
    truth = {"method": "rule", "ground_truth": episode.ground_truth}
    given = {"reward_spec": truth, "reward_model": truth, "extra_info": episode.columns}
    return {**given, "max_turns": episode.max_turns, **row}
