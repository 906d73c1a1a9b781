"""Environments of verifiers before 0.4: rollout and scores are those of its `run_rollout`. Standard library only.

Its Rubric turns the exception of a reward function into a score of 0; here it fails the episode.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from rljob_api.errors import UserError
from rljob_plugins.verifiers.rows import Numbered, find_index
from rljob_service.worker.episodes.types import Access, Episode, Reply
from rljob_service.worker.forms.json_values import to_log

_TRAIN, _EVAL = "train", "eval"
_LOGGED = ("metrics", "stop_condition", "is_truncated", "info")


class LegacyEnvironment:
    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._problems: ContextVar[list[BaseException]] = ContextVar("problems")
        self._max_turns = getattr(environment, "max_turns", -1)
        if environment.requires_group_rollouts:
            raise UserError("agent.environment: its Rubric compares the answers of a group, which an episode lacks")
        for rubric in _rubrics(environment.rubric):
            rubric.funcs[:] = [_watch(function, self._problems) for function in rubric.funcs]

    async def play(self, episode: Episode, access: Access) -> Reply:
        from openai import AsyncOpenAI
        from verifiers.legacy.clients import OpenAIChatCompletionsClient

        environment = self._environment
        is_training = episode.columns.get("split") == _TRAIN
        examples = environment.get_dataset() if is_training else environment.get_eval_dataset()
        example = examples[find_index(episode, len(examples))]
        if hasattr(environment, "max_turns"):
            own = self._max_turns
            environment.max_turns = min(own, episode.max_turns) if own > 0 else episode.max_turns
        problems: list[BaseException] = []
        self._problems.set(problems)  # for what this episode starts
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
            wrapped = OpenAIChatCompletionsClient(client)
            output = await environment.run_rollout(example, wrapped, access.name, {})
        if output.get("error"):
            raise RuntimeError(f"verifiers: {output['error']}")
        if problems:
            raise problems[0]
        state = {"answer": output.get("answer"), "metrics": output.get("metrics"), "end": output.get("stop_condition")}
        return Reply(output["reward"], state=to_log(state), info={key: output.get(key) for key in _LOGGED})

    def rows(self, split: str) -> Numbered:
        examples = self._find_split(split)
        if examples is None:
            raise UserError(
                f"the environment has no dataset for the split {split}: verifiers has the splits {_TRAIN} and {_EVAL}, "
                "of those that the environment sets; offset and limit hold rows of one out"
            )
        return Numbered(len(examples), lambda number: dict(examples[number]))

    def _find_split(self, split: str) -> Any:
        """Return a dataset, or None. Its get_eval_dataset falls back to the dataset of training."""
        environment = self._environment
        if split == _TRAIN:
            return environment.build_dataset()
        return environment.build_eval_dataset() if split == _EVAL else None


def load(id: str, args: dict[str, Any]) -> LegacyEnvironment:
    import verifiers

    return LegacyEnvironment(verifiers.load_environment(id, **args))


def adopt(value: Any, args: dict[str, Any]) -> LegacyEnvironment:
    made = value(**args) if callable(value) else value
    if not hasattr(made, "run_rollout"):
        raise UserError(f"{value!r} is not an environment of verifiers: a class, a Taskset, or load_environment")
    return LegacyEnvironment(made)


def _rubrics(rubric: Any) -> Iterator[Any]:
    """Yield a rubric, or the members of a group of rubrics."""
    members = getattr(rubric, "rubrics", None)
    if members is None:
        yield rubric
    else:
        for member in members:
            yield from _rubrics(member)


def _watch(function: Callable[..., Any], problems: ContextVar[list[BaseException]]) -> Callable[..., Any]:
    """Return the function with its name and signature, which notes what it raises."""

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:
            problems.get([]).append(error)
            raise

    return call
