"""The reward of the guess example, in verl's signature: it scores the last answer of a conversation."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None, cost=0.0):
    """1.0 when the last answer is the number, and 1.0 for ending, which is more than all wrong answers cost.

    `cost` of wrong answers, if the user does not charge it at their turns: the same total at the end. Without a
    conversation nothing is charged.
    """
    extra_info = extra_info or {}
    numbers = re.findall(r"\d+", solution_str)
    found = bool(numbers) and numbers[-1] == ground_truth
    ended = not extra_info.get("truncated", False)
    penalty = (extra_info.get("state") or {}).get("penalty", 0)
    turns = len(extra_info.get("turns") or [solution_str])
    return {"score": 1.0 * found + 1.0 * ended - cost * penalty, "found": found, "turns": turns}
