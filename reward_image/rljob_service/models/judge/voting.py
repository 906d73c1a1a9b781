"""Send one question as many times as there are votes.

The caller reads the answers. Invariant: a failed vote is a value, not an exception, so that it does not affect the
other votes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rljob_service.models.chat import ChatAnswer
from rljob_service.models.execution import ExecutionProgress, NoScoreError

T = TypeVar("T")


async def ask_votes(
    ask: Callable[[], Awaitable[ChatAnswer]], votes: int, read: Callable[[str], T], progress: ExecutionProgress
) -> list[T | NoScoreError]:
    """Return the votes that `read` finds in the answers. Their tokens are those of the execution."""
    answers = await asyncio.gather(*(ask() for _ in range(votes)))
    tokens = [answer.tokens for answer in answers if answer.tokens is not None]
    if len(tokens) == votes:
        progress.used = sum(tokens)
    return [_read(answer.text, read) for answer in answers]


def _read(text: str | NoScoreError, read: Callable[[str], T]) -> T | NoScoreError:
    if isinstance(text, NoScoreError):
        return text
    try:
        return read(text)
    except NoScoreError as error:
        return error
