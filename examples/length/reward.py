"""Prefers short right answers: one that is longer than the group's shortest right answer loses up to `penalty`.

Two steps (scope: sampleThenGroup): compute_score scores a sample as soon as it ends, and post_process_scores scores the
group once all its samples have a score. A wrong answer gains nothing by being short.
"""

import re

NUMBER = re.compile(r"-?\d+(?:,\d{3})*")


class LengthPenalty:
    def __init__(self, penalty=0.5):
        self.penalty = penalty

    def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
        numbers = [number.replace(",", "") for number in NUMBER.findall(solution_str)]
        correct = bool(numbers) and numbers[-1] == str(ground_truth)
        # The driver sends the number of sampled tokens; test-reward does not, so count characters.
        length = (extra_info or {}).get("num_tokens", len(solution_str))
        return {"score": float(correct), "correct": correct, "length": length}

    def post_process_scores(self, group):
        lengths = [sample["components"]["length"] for sample in group if sample["components"]["correct"]]
        shortest, longest = min(lengths, default=0), max(lengths, default=0)
        return [self._shorten(sample, shortest, longest) for sample in group]

    def _shorten(self, sample, shortest, longest):
        if not sample["components"]["correct"] or longest == shortest:
            return {"score": sample["score"], "longer": 0.0}
        longer = (sample["components"]["length"] - shortest) / (longest - shortest)
        return {"score": sample["score"] - self.penalty * longer, "longer": longer}
