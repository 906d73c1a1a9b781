"""A reward in TRL's signature, in the manner of its documentation: chat completions, a column, an abstention."""

import re


def reward_func(prompts, completions, ground_truth, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    matches = [re.search(r"\\boxed\{(.*?)\}", content) for content in contents]
    kwargs["log_metric"]("num_boxed", sum(match is not None for match in matches))
    if kwargs["split"][0] == "unlabelled":
        return [None] * len(completions)
    pairs = zip(matches, ground_truth, strict=True)
    return [1.0 if match and match.group(1) == truth else 0.0 for match, truth in pairs]
