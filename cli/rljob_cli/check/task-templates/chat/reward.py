"""The reward of a reply: the fact that the visitor asked for, in few words.

The signature is verl's. A dict needs `score`; other numbers in it become curves. `extra_info` has the other columns of
the row. After an exception the sample is masked: it never counts as zero.
"""

import re

MAX_WORDS = 15


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """0.5 for the right time of day, 0.3 more if it is the only one, and 0.2 for a short reply."""
    times = re.findall(r"\d+:\d\d", solution_str)
    answered, exact = ground_truth in times, times == [ground_truth]
    short = len(solution_str.split()) <= MAX_WORDS
    return {"score": 0.5 * answered + 0.3 * exact + 0.2 * short, "exact": exact, "answered": answered, "short": short}
