"""The usual reward of GSM8K, in verl's signature: the number after `####` must be that of the reference."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right number after the last `####`, else 0. The reference may be the whole solution or the number."""
    answers = re.findall(r"####\s*(-?[\d,]*\.?\d+)", solution_str)
    answer = answers[-1].replace(",", "") if answers else None
    reference = ground_truth.split("####")[-1].strip().replace(",", "")
    acc = answer == reference
    return {"score": float(acc), "acc": acc, "formatted": bool(answers), "pred": answer}  # pred: for maj@n
