"""A reward in verl's signature, in the manner of its gsm8k module: the last `#### N` must be the answer."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str)
    answer = found[-1].replace(",", "") if found else None
    return {"score": 1.0 if answer == ground_truth else 0.0, "acc": answer == ground_truth, "pred": answer}
