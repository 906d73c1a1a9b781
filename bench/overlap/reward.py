"""GSM8K's usual reward, behind a wait: U(low, high) seconds, as a judge or a sandbox would take.

The wait is drawn from the sample itself, so every variant of the benchmark waits for the same sample as long.
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
