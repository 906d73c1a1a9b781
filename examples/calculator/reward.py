"""The reward of the calculator example, in verl's signature: a right answer, and a call of the tool on the way.

`extra_info["turns"]` has the tool calls of each answer: name, arguments, and error if the call failed.
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 when the last answer's last number is right, 0.5 for a call that worked, and 0.1 for ending."""
    extra_info = extra_info or {}
    ended = not extra_info.get("truncated", False)
    calls = [call for turn in extra_info.get("turns") or [] for call in turn["tool_calls"]]
    worked = any(not call["error"] for call in calls)
    numbers = re.findall(r"-?\d+", solution_str)
    right = bool(numbers) and numbers[-1] == ground_truth
    return {"score": 1.0 * right + 0.5 * worked + 0.1 * ended, "right": right, "called": worked}
