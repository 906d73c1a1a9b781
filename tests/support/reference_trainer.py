"""A policy update in plain torch, to compare with: one sequence at a time, all logits, and autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rljob_api.manifest.algorithm import Algorithm
from rljob_trainer.episodes.types import TrainRow, UpdateVersions
from tests.support import policy_scenarios


class ReferenceTrainer:
    """The independent computation: one sequence at a time, all logits, and autograd."""

    def __init__(self, folder: Path, algorithm: Algorithm) -> None:
        from transformers import AutoModelForCausalLM

        def load() -> Any:
            return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)

        self.model, self.reference = load(), load().requires_grad_(False)
        self.algorithm = algorithm

    def logprobs(self, model: Any, row: TrainRow) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = row.token_ids.tolist()
        every = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1] / row.temperature, dim=-1)
        return every.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], -(every.exp() * every).sum(-1)

    def divergence(self, row: TrainRow, mask: torch.Tensor) -> torch.Tensor:
        assert row.top is not None
        every = torch.log_softmax(self.model(torch.tensor([row.token_ids.tolist()])).logits[0, :-1], dim=-1)[mask]
        theirs = torch.tensor(row.top["logprob"][:, 0])
        own = every.gather(1, torch.tensor(row.top["token"][:, 0], dtype=torch.int64))
        return torch.nn.functional.kl_div(own, theirs, log_target=True, reduction="sum")

    def loss(self, rows: list[TrainRow], versions: UpdateVersions, denominator: float) -> torch.Tensor:
        a, total = self.algorithm, torch.zeros(())
        for row in rows:
            mask = torch.from_numpy(row.loss_mask[1:])
            advantages, rollout = torch.from_numpy(row.advantages[1:]), torch.from_numpy(row.rollout_logprobs[1:])
            new, entropy = self.logprobs(self.model, row)
            share = [proximal_share(version, versions) for version in row.versions[1:]]
            proximal = rollout + torch.tensor(share) * (new.detach() - rollout)
            gain = policy_gain(a, new, proximal, advantages, mask)
            gain = gain * importance(a, new.detach(), proximal, rollout, mask)
            if row.reference_logprobs is None:
                reference = self.logprobs(self.reference, row)[0]
            else:
                reference = torch.from_numpy(row.reference_logprobs[1:])
            kl = reference - new
            per_token = -gain + a.kl.coefficient * (kl.exp() - 1 - kl) - a.entropy_coefficient * entropy
            total = total + row.weight * per_token[mask].sum()
            if row.top is not None:
                total = total + row.weight * policy_scenarios.TEACHER["weight"] * self.divergence(row, mask)
        return total / denominator

    def gradients(
        self, rows: list[TrainRow], versions: UpdateVersions = policy_scenarios.FIRST, level: str = "token"
    ) -> tuple[float, dict[str, torch.Tensor], float]:
        """Return the loss, the clipped gradients by name, and the norm before the clip."""
        self.model.zero_grad()
        loss = self.loss(rows, versions, policy_scenarios.denominator(rows, level))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.algorithm.optimizer.max_grad_norm)
        return loss.item(), {name: p.grad.clone() for name, p in self.model.named_parameters()}, norm.item()


def policy_gain(
    algorithm: Algorithm, new: torch.Tensor, proximal: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:  # all [tokens]
    """What the algorithm's paper maximises for each token."""
    ratio, kind = torch.exp(new - proximal), algorithm.type
    if kind == "rloo":
        return ratio * advantages
    if kind == "cispo":
        return ratio.detach().clip(max=5.0) * advantages * new
    low, high = 0.2, algorithm.loss.clip_high or (0.28 if kind == "dapo" else 0.2)
    if kind == "gspo":  # GSPO-token: the sequence's ratio, with each token's own gradient
        low, high = 3e-4, 4e-4
        ratio = torch.exp((new - proximal)[mask].mean()).detach() * (new.exp() / new.detach().exp())
    gain = torch.minimum(ratio * advantages, ratio.clip(1 - low, 1 + high) * advantages)
    dual = {"dapo": 10.0, "gspo": torch.inf}.get(kind, 3.0)
    return torch.where(advantages < 0, gain.maximum(dual * advantages), gain)


def importance(
    algorithm: Algorithm, new: torch.Tensor, proximal: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:  # all [tokens]
    """The truncated weight of each token, or that of the row, and 0 for all of a row whose mean ratio is rejected."""
    correction, log_weights = algorithm.correction, proximal - rollout
    if correction.level == "sequence":
        log_weights = log_weights[mask].sum().expand(len(mask))
    weights = torch.exp(log_weights).clip(max=correction.cap)
    if correction.rejection is None:
        return weights
    cap, mean = correction.rejection.cap, torch.exp((new - rollout)[mask].mean())
    return weights * (1 / cap <= mean <= cap)


def proximal_share(version: int, versions: UpdateVersions) -> float:
    """AReaL's loglinear rule, written again."""
    if version in (-1, versions.current):
        return 1.0
    end = versions.end if version < versions.proximal else versions.current
    return min(1.0, max(0.0, (versions.proximal - version) / (end - version)))
