"""The conversation of one episode that the trainer plays: messages, and the segments of exact tokens.

One branch of a TurnTree, in which each prompt continues the last answer; turns.py proves when it does.
"""

from collections.abc import Sequence

from rljob_api.wire.base import Message
from rljob_api.wire.calls import ToolSchema
from rljob_trainer.conversation.continuation import Break, BreakCause
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.conversation.turns import Plan, Turn, TurnTree
from rljob_trainer.episodes.types import Completion, Segment, Whole

__all__ = ["Break", "BreakCause", "Conversation"]


class Conversation:
    """Call next_prompt, generate, add_answer, then add what the environment replies, and so on."""

    def __init__(self, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> None:
        self.messages: list[Message] = list(messages)
        """All messages, with the prompt's."""
        self._tree = TurnTree(template)
        self._tools = list(tools)
        self._added: list[Message] = list(messages)
        """What follows the last answer."""
        self._last: Turn | None = None
        self._plan: Plan | None = None

    @property
    def segments(self) -> list[Segment]:
        """Each ends with a sampled token: a prompt joins its segment when it is answered."""
        return self._tree.segments

    @property
    def breaks(self) -> list[Break]:
        """[segments - 1] Why each segment but the first began."""
        return self._tree.breaks

    @property
    def rendered(self) -> list[Message]:
        """`messages` as the template gets them: an answer that it refuses is text."""
        return self._tree.read_rendered(self._last) + self._added

    def read_whole(self) -> Whole | None:
        """Return the conversation up to the last answer; None without one."""
        return None if self._last is None else self._tree.read_whole(self._last)

    def next_prompt(self) -> list[int]:
        """Return the tokens after which the policy answers. Raise TemplateError if the template refuses the messages.

        Without an answer in between, it returns the same prompt.
        """
        if self._plan is None:
            self._plan = self._tree.plan(self._last, self._added, self._tools)
        return self._tree.read_prompt(self._plan)

    def add_answer(self, completion: Completion, message: Message) -> None:
        """Record what was sampled after `next_prompt`, unchanged, and what it is in the conversation."""
        if self._plan is None:
            raise ValueError("next_prompt must be called before add_answer")
        plan, self._plan = self._plan, None
        self._last = self._tree.record(plan, completion, message)
        self._added = []
        self.messages.append(message)

    def add(self, messages: Sequence[Message]) -> None:
        """Record results of tools, or the user's reply."""
        if self._plan is not None:
            raise ValueError("add_answer must be called before add: the last prompt has no answer yet")
        self.messages += messages
        self._added += messages
