"""The reward of a reply: the fact that the visitor asked for, in few words.

The signature is verl's. A dict needs `score`; other numbers in it become curves. `extra_info` has the other columns of
the row. After an exception the sample is masked: it never counts as zero.
"""

import re

MAX_WORDS = 15


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """0.7 for the right time of day, and 0.3 if such a reply is short."""
    answered = re.findall(r"\d+:\d\d", solution_str) == [ground_truth]
    short = len(solution_str.split()) <= MAX_WORDS
    return {"score": answered * (0.7 + 0.3 * short), "answered": answered, "short": short}
