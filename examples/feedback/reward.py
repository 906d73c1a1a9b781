"""The reward of the feedback example, in verl's signature: it scores the last answer of a conversation.

`extra_info` has the whole conversation: `messages`, `turns` (text, reward and tool calls of each answer), `state` (the
user's) and `end` (why it ended). Without turns the only answer is the first and the last.
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 when the last number is right, and 0.5 for ending, which is more than all wrong tries cost.

    An answer at the token limit ends the conversation. Were that cheaper than a wrong try, it would be learned.
    """
    extra_info = extra_info or {}
    ended = not extra_info.get("truncated", False)
    turns = extra_info.get("turns") or [{"text": solution_str}]
    first, last = (_last_number(text) == ground_truth for text in (turns[0]["text"], solution_str))
    return {"score": 1.0 * last + 0.5 * ended, "last": last, "first": first, "turns": len(turns)}


def _last_number(text):
    numbers = re.findall(r"-?\d+", text)
    return numbers[-1] if numbers else ""
