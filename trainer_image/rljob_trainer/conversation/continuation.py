"""Whether the next prompt may continue the tokens of the last one, and with which text. Pure, on texts alone."""

import enum
from dataclasses import dataclass

from rljob_api.wire.base import Message

_SHOWN_BEFORE, _SHOWN_AFTER = 20, 80
"""Characters around the first difference."""


class BreakCause(enum.StrEnum):
    """Why a new segment began: what the chat template does, or for a program's requests, what the request does."""

    PROMPT = "prompt"
    """It writes the prompt otherwise once it is answered: for example, the header of an answer in the history differs
    from the one after which the policy answers."""
    ANSWER = "answer"
    """It leaves a part of the last answer out of the history, or ends it otherwise: for example, it drops reasoning."""
    HISTORY = "history"
    """It writes earlier messages otherwise once later ones follow: for example, it drops reasoning before the last
    message of the user."""
    TOOLS = "tools"
    """The request has other tools than the one that it continues."""
    BRANCH = "branch"
    """The request continues a turn that another request has continued: another sample of the same prompt, a sub-agent,
    a tree search, or a program that drops or edits what followed. The new segment begins with the exact tokens up to
    that turn."""
    UNMATCHED = "unmatched"
    """The request contains no recorded answer: a sub-agent, a compacted or edited history."""


@dataclass(frozen=True)
class Break:
    turn: int
    """The first turn of the new segment."""
    cause: BreakCause
    expected: str
    """Text of the earlier tokens from shortly before the first difference."""
    found: str
    """What is written there now."""

    @property
    def difference(self) -> str:
        """One line for people."""
        return f"{self.expected!r} became {self.found!r}"


@dataclass(frozen=True)
class Answered:
    """The last prompt and its answer, as texts."""

    prompt: str
    """What the template wrote for the prompt, with the header of the answer."""
    body: str
    """What was sampled, without the token that ended it."""
    end: str
    """The token that ended it. Empty: the answer was cut off, or a stop string ended it."""
    message: Message
    """The answer as the template gets it, without what the prompt already has at its end, such as <think>."""
    closed: str
    """What the template writes for the conversation up to this answer, without a header."""
    tail: str
    """What the template writes after the body of an answer."""
    unsampled: str
    """The part of the tail that follows `end`."""


def find_following(answered: Answered, text: str, turn: int) -> str | Break:
    """Return what follows the sampled tokens in `text`, the next prompt, or why it does not continue the last one."""
    end = _find_end(answered, text)
    if end is not None:
        return answered.unsampled + text[end:]
    if not answered.closed.startswith(answered.prompt):
        return compare(turn, BreakCause.PROMPT, answered.prompt, answered.closed)
    if not _is_kept(answered):
        return compare(turn, BreakCause.ANSWER, answered.prompt + answered.body + answered.tail, answered.closed)
    return compare(turn, BreakCause.HISTORY, answered.closed, text)


def _find_end(answered: Answered, text: str) -> int | None:
    """Return where the answer and its tail end in `text`; None if the template writes something else there."""
    if not _is_kept(answered):
        return None
    if text.startswith(answered.closed):
        return len(answered.closed)
    # The template may write less than at first, such as no empty reasoning, but not less than the message.
    if not answered.tail or not text.startswith(answered.prompt):
        return None
    written, tail, _ = text[len(answered.prompt) :].partition(answered.tail)
    at_first = _squeeze(answered.closed[len(answered.prompt) :])
    if not tail or _squeeze(written) not in at_first or not _keeps(written, answered.message):
        return None
    return len(answered.prompt) + len(written) + len(tail)


def _is_kept(answered: Answered) -> bool:
    """Whether `closed` is the prompt and the whole answer."""
    if not answered.closed.startswith(answered.prompt) or not answered.closed.endswith(answered.tail):
        return False
    return _keeps(answered.closed[len(answered.prompt) :], answered.message)


def _keeps(written: str, message: Message) -> bool:
    """Whether `written` has all of the message. White space, and how calls are printed, may differ."""
    content = message.get("content")
    names = [call["function"]["name"] for call in message.get("tool_calls") or []]
    squeezed = _squeeze(written)
    return _squeeze(content if isinstance(content, str) else "") in squeezed and all(
        _squeeze(name) in squeezed for name in names
    )


def _squeeze(text: str) -> str:
    return "".join(text.split())


def compare(turn: int, cause: BreakCause, expected: str, found: str) -> Break:
    """Return a break that shows the first difference of two texts."""
    start = max(0, _count_equal(expected, found) - _SHOWN_BEFORE)
    stop = start + _SHOWN_BEFORE + _SHOWN_AFTER
    return Break(turn, cause, expected[start:stop], found[start:stop])


def _count_equal(one: str, other: str) -> int:
    """Return the length of the common prefix, by bisection: texts have up to a million characters."""
    equal, unequal = 0, min(len(one), len(other)) + 1
    while unequal - equal > 1:
        middle = (equal + unequal) // 2
        if one[:middle] == other[:middle]:
            equal = middle
        else:
            unequal = middle
    return equal
