"""The loop of environments that take an answer and return what follows, step by step, and rows for those that a seed
begins. Standard library only.

Leaves to adapters how a step becomes messages. Invariant: a step's reward belongs to the answer that caused it; None is
not recorded, since it is not 0.
"""

import asyncio
import inspect
import itertools
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rljob_service.worker.environments.base import Answer, Model, RefusedError
from rljob_service.worker.environments.model import is_limit
from rljob_service.worker.episodes.types import Episode, Message

_HELD_OUT_SEEDS = 1_000_000_000
"""The first seed of each split except train, whose seeds begin at 0: no held-out row is trained on."""


class NotAnActionError(ValueError):
    """An answer that is not an action of the environment; the text is for the policy."""


class Step(NamedTuple):
    """What an environment returned for an answer."""

    messages: Sequence[Message] = ()
    """What the policy sees next."""
    reward: Any = None
    """Reward of this answer. None: none, which is not 0."""
    done: bool = False
    answer: Message | None = None
    """What the environment put in the place of the answer. None: the answer as it was sampled."""


class Played(NamedTuple):
    rewards: dict[str, Any]
    """By the id of the completion."""
    num_turns: int
    end: str
    """done, max_turns, or the code of the gateway's refusal."""


async def play_steps(
    episode: Episode,
    model: Model,
    messages: Sequence[Message],
    take: Callable[[Answer], Step | Awaitable[Step]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> Played:
    """Let the policy answer, and the environment `take` the answers, until it is done or a limit is reached.

    A limit ends the episode with the rewards so far.
    """
    rewards: dict[str, Any] = {}
    history = list(messages)
    for turn in range(episode.max_turns):
        try:
            answer = await asyncio.to_thread(model.chat, history, tools)  # connections of the environment stay alive
        except RefusedError as error:
            if not is_limit(error):
                raise
            return Played(rewards, turn, error.code)
        step = take(answer)
        step = await step if inspect.isawaitable(step) else step
        if step.reward is not None:
            rewards[answer.id] = step.reward
        if step.done:
            return Played(rewards, turn + 1, "done")
        history += [step.answer or answer.message, *step.messages]
    return Played(rewards, episode.max_turns, "max_turns")


def append_text(messages: Sequence[Message], text: str, separator: str = "\n\n") -> list[Message]:
    """Return the messages with a text at the end: of the last one if the user wrote it, else as a new one, since many
    chat templates refuse two messages of a user in a row."""
    if not messages or messages[-1].get("role") != "user":
        return [*messages, {"role": "user", "content": text}]
    last = messages[-1]
    content = last.get("content") or ""
    if isinstance(content, list):
        return [*messages[:-1], {**last, "content": [*content, {"type": "text", "text": text}]}]
    return [*messages[:-1], {**last, "content": f"{content}{separator if content else ''}{text}"}]


def row_of(episode: Episode) -> dict[str, Any]:
    """Return the job's row: prompt, answer, data_source and all other columns by name."""
    own = {"prompt": episode.prompt, "answer": episode.ground_truth, "data_source": episode.data_source}
    return own | episode.columns


def seed_of(episode: Episode) -> int:
    """Return the row's column `seed`, or else its index, or a number for what is not an integer: all episodes of a
    prompt begin alike, as their comparison requires."""
    seed = episode.columns.get("seed", episode.columns.get("index"))
    if seed is None:
        return episode.seed
    return seed if isinstance(seed, int) else zlib.crc32(str(seed).encode())


def list_seeds(split: str) -> Iterator[dict[str, Any]]:
    """Yield rows without end, one for each seed: what begins is up to the environment, and the prompt is empty."""
    for seed in itertools.count(0 if split == "train" else _HELD_OUT_SEEDS):
        yield {"prompt": "", "answer": None, "seed": seed}
