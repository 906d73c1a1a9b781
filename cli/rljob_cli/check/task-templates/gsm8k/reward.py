"""The usual reward of GSM8K, in verl's signature: the number after `####` must be that of the reference.

A dict needs `score`; other numbers in it become curves. After an exception the sample is masked: it never counts as
zero.
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right number after the last `####`, else 0. The reference may be the whole solution or the number."""
    answers = re.findall(r"####\s*(-?[\d,]*\.?\d+)", solution_str)
    answer = answers[-1].replace(",", "") if answers else None
    reference = ground_truth.split("####")[-1].strip().replace(",", "")
    return {"score": float(answer == reference), "acc": answer == reference, "formatted": bool(answers)}
