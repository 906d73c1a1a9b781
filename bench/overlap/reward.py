"""GSM8K's usual reward after a wait of U(low, high) seconds, like that of a judge or a sandbox.

The wait depends on the sample only, so it is the same in every variant of the benchmark. Half of the score is a number
that does as well: the model answers hardly any question, and groups of equal scores would not be trained on.
"""

import hashlib
import random
import re
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None, low=0.0, high=0.0):
    text = f"{(extra_info or {}).get('index')}/{solution_str}"
    numbers = random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
    time.sleep(numbers.uniform(low, high))
    found = re.findall(r"-?\d[\d,]*\.?\d*", solution_str)
    answer = ground_truth.rsplit("####", 1)[-1].strip().replace(",", "")
    is_right = bool(found) and found[-1].replace(",", "").rstrip(".") == answer
    return 0.5 * is_right + 0.5 * numbers.random()
