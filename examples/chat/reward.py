"""The reward of the chat example, in verl's signature: a right answer, and an end before the token limit."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 when the last number is right, and 0.25 for ending; otherwise the model would write until the limit."""
    ended = not (extra_info or {}).get("truncated", False)
    numbers = re.findall(r"-?\d+", solution_str)
    last = bool(numbers) and numbers[-1] == ground_truth
    exact = ended and solution_str.strip() == ground_truth
    return {"score": 1.0 * last + 0.25 * ended, "last": last, "exact": exact}
