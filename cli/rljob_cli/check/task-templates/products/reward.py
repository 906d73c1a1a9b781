"""The reward of a conversation. Change it to train for another goal.

The signature is verl's; with `completion: last`, `solution_str` is the last answer. `extra_info` has the other columns
of the row, and the whole conversation: `messages`, `turns` (text, reward and tool_calls of each answer), `state` of the
user, and `end`. A dict needs `score`; other numbers in it become curves. After an exception the sample is masked: it
never counts as zero.
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """0.4 if the last number is right, 0.4 more if it is alone, and 0.2 for ending, which is more than all wrong tries
    cost: an answer at the token limit ends the conversation, too."""
    turns = (extra_info or {}).get("turns") or []
    numbers = re.findall(r"-?\d+", solution_str)
    exact = solution_str.strip() == ground_truth
    last = bool(numbers) and numbers[-1] == ground_truth
    called = any(not call["error"] for turn in turns for call in turn["tool_calls"])
    ended = not (extra_info or {}).get("truncated", False)
    score = 0.4 * last + 0.4 * exact + 0.2 * ended
    return {"score": score, "exact": exact, "last": last, "called": called, "turns": len(turns)}
