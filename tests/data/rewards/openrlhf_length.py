"""A reward in OpenRLHF's signature, in the manner of its examples: rewards, scores and extra_logs as tensors."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    reward = torch.tensor([float(label in response) for response, label in zip(responses, labels, strict=True)])
    return {
        "rewards": reward,
        "scores": reward.clamp(0, 1),
        "extra_logs": {"length": torch.tensor([len(r) for r in responses])},
    }
