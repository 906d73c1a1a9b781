"""The text of a completion as a message of OpenAI's chat completions: content, reasoning, tool calls. Pure."""

from __future__ import annotations

from rljob_api.wire.protocol import Message
from rljob_trainer.conversation.tool_calls import ToolFormat


def parse_answer(
    text: str, *, tool_format: ToolFormat | None, prompt_text: str, has_reasoning: bool, call_prefix: str
) -> Message:
    """Return role, content (None if there are calls alone), and if any reasoning_content and tool_calls.

    `text`: without special tokens. `tool_format`: None without tools, or if the answer was cut off: half a call is none.
    `prompt_text`: its end may open <think>. `has_reasoning`: see ChatTemplate. `call_prefix`: of the ids of calls.
    """
    raise NotImplementedError
