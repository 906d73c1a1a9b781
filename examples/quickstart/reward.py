"""The reward of the quickstart, in verl's signature. Change it to train for another goal."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """0.3 for any bare number, 0.2 when the last number is right, 0.7 when the completion is only the right answer.

    A bare number is worth more than a right one in a sentence: the other way round, some runs learn the sentences and
    never leave them. A completion that hit the token limit is never 'bare'; otherwise the model would write until the
    limit.
    `exact` and `last` have their own curves; evaluation.accuracy names the one to report.
    """
    ended = not (extra_info or {}).get("truncated", False)
    numbers = re.findall(r"-?\d+", solution_str)
    bare = solution_str.strip() if ended else ""
    last = bool(numbers) and numbers[-1] == ground_truth
    exact = bare == ground_truth
    is_number = re.fullmatch(r"-?\d+", bare) is not None
    return {"score": 0.3 * is_number + 0.2 * last + 0.7 * exact, "exact": exact, "last": last}
