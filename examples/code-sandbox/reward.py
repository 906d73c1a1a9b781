"""The reward of the code-sandbox example, in verl's signature: a right answer, and code on the way that computes it.

`extra_info["turns"]` has the tool calls of each answer, and `extra_info["messages"]` what they returned.
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 when the last answer's last number is right, 0.5 for code whose result is, and 0.1 for ending."""
    extra_info = extra_info or {}
    ended = not extra_info.get("truncated", False)
    called = any(turn["tool_calls"] for turn in extra_info.get("turns") or [])
    results = [each["content"] for each in extra_info.get("messages") or [] if each["role"] == "tool"]
    computed = ground_truth in results
    numbers = re.findall(r"-?\d+", solution_str)
    right = bool(numbers) and numbers[-1] == ground_truth
    score = 1.0 * right + 0.5 * computed + 0.1 * ended
    return {"score": score, "right": right, "computed": computed, "called": called}
