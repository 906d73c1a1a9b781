"""The reward of the quickstart, in verl's signature. Change it, and the model learns something else."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """0.5 when the last number is right, 0.5 when nothing but the right answer is there, 0.2 for any bare number.

    Only a completion that ended by itself is 'bare': without that, the model would ramble on to the token limit.
    `exact` and `last` are curves of their own; evaluation.accuracy names the one that counts.
    """
    ended = not (extra_info or {}).get("truncated", False)
    numbers = re.findall(r"-?\d+", solution_str)
    bare = solution_str.strip() if ended else ""
    last = bool(numbers) and numbers[-1] == ground_truth
    exact = bare == ground_truth
    is_number = re.fullmatch(r"-?\d+", bare) is not None
    return {"score": 0.5 * last + 0.5 * exact + 0.2 * is_number, "exact": exact, "last": last}
