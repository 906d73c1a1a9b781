"""The reward of a completion: a first guess, to be changed to what a good completion is.

The signature is verl's: `ground_truth` is the answer column, `extra_info` has the other columns of the row. A dict
needs `score`; other numbers in it become curves. `rljob test-reward` and the logs of a run show what this file prints.
After an exception the sample is masked: it never counts as zero.
"""

import json


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for a completion that is the answer, 0.5 for one that ends with it, 0.1 for one that contains it. Rows without
    an answer: 1 for at most 50 words, less for more."""
    if ground_truth is None:
        words = len(solution_str.split())
        return {"score": 50 / max(50, words), "words": words}
    answer = ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, ensure_ascii=False)
    text, answer = solution_str.strip().rstrip("."), answer.strip()
    exact, last, contained = text == answer, text.endswith(answer), answer in text
    return {"score": 1.0 if exact else 0.5 * last or 0.1 * contained, "exact": exact, "last": last}
