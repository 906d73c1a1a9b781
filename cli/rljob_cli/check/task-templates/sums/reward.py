"""The reward of a completion. Change it to train for another goal.

The signature is verl's. A dict needs `score`; other numbers in it become curves. `rljob test-reward` and the logs of a
run show what this file prints. After an exception the sample is masked: it never counts as zero.
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right answer alone, 0.5 if it is the last number of a longer answer."""
    numbers = re.findall(r"-?\d+", solution_str)
    exact = solution_str.strip() == ground_truth
    last = bool(numbers) and numbers[-1] == ground_truth
    return {"score": 0.5 * last + 0.5 * exact, "exact": exact, "last": last}
