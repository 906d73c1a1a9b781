"""GSM8K's usual reward after a wait of U(low, high) seconds, like that of a judge or a sandbox.

The wait depends on the sample only, so it is the same in every variant of the benchmark.
"""

import hashlib
import random
import re
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None, low=0.0, high=0.0):
    text = f"{(extra_info or {}).get('index')}/{solution_str}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    time.sleep(random.Random(seed).uniform(low, high))
    numbers = re.findall(r"-?\d[\d,]*\.?\d*", solution_str)
    answer = ground_truth.rsplit("####", 1)[-1].strip().replace(",", "")
    return float(bool(numbers) and numbers[-1].replace(",", "").rstrip(".") == answer)
