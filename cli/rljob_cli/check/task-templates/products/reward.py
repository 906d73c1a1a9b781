"""The reward of a conversation. Change it to train for another goal.

The signature is verl's; `solution_str` is the last answer. `extra_info` has the other columns of the row, and the whole
conversation: `messages`, `turns` (text, reward and tool_calls of each answer), `state` of the user, and `end`. A dict
needs `score`; other numbers in it become curves. After an exception the sample is masked: it never counts as zero.
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 if the last answer is the right number alone, 0.5 if the right number is the last one of a longer answer."""
    turns = (extra_info or {}).get("turns") or []
    numbers = re.findall(r"-?\d+", solution_str)
    exact = solution_str.strip() == ground_truth
    last = bool(numbers) and numbers[-1] == ground_truth
    called = any(not call["error"] for turn in turns for call in turn["tool_calls"])
    return {"score": 0.5 * last + 0.5 * exact, "exact": exact, "last": last, "called": called, "turns": len(turns)}
