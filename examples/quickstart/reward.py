"""The reward of the quickstart, in verl's signature. Change it to train for another goal."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """0.5 when the last number is right, 0.5 when the completion is only the right answer, 0.2 for any bare number.

    A completion that hit the token limit is never 'bare'; otherwise the model would write until the limit.
    `exact` and `last` have their own curves; evaluation.accuracy names the one to report.
    """
    ended = not (extra_info or {}).get("truncated", False)
    numbers = re.findall(r"-?\d+", solution_str)
    bare = solution_str.strip() if ended else ""
    last = bool(numbers) and numbers[-1] == ground_truth
    exact = bare == ground_truth
    is_number = re.fullmatch(r"-?\d+", bare) is not None
    return {"score": 0.5 * last + 0.5 * exact + 0.2 * is_number, "exact": exact, "last": last}
