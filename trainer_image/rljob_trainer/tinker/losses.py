"""The losses of Tinker, each a sum over the targets of a micro-batch. Pure.

    ratio = exp(log-prob - log-prob at which the token was sampled)

cross_entropy also is what the SDK trains its custom losses with, whose gradient are its weights.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
"""By the names of INPUTS; all [targets], in fp32."""
INPUTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
}
"""What each loss reads of a datum besides its targets."""
SETTINGS: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
}
"""What loss_fn_config may set, with Tinker's defaults, and of dro the value of its example."""


def compute_loss(name: str, settings: Mapping[str, float], logprobs: Tensor, inputs: Inputs) -> Tensor:
    """Return the sum, with the gradient to `logprobs`.  logprobs  # [targets]"""
    return _LOSSES[name](logprobs, inputs, {**SETTINGS[name], **settings}).sum()


def _cross_entropy(logprobs: Tensor, inputs: Inputs, _: Mapping[str, float]) -> Tensor:
    return -logprobs * inputs["weights"]


def _importance_sampling(logprobs: Tensor, inputs: Inputs, _: Mapping[str, float]) -> Tensor:
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def _ppo(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, settings) * advantages)


def _cispo(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    return -_clip(_ratio(logprobs, inputs), settings).detach() * logprobs * inputs["advantages"]


def _dro(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    """Richemond et al. 2024, Offline Regularised Reinforcement Learning for Large Language Models Alignment."""
    return settings["beta"] / 2 * (logprobs - inputs["logprobs"]).square() - logprobs * inputs["advantages"]


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


def _clip(ratio: Tensor, settings: Mapping[str, float]) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


_LOSSES: Mapping[str, Callable[[Tensor, Inputs, Mapping[str, float]], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
}
