"""Program of test_critic: `main(FOLDER)` runs each scenario with one FSDP2 rank and with two.

Writes FOLDER/NAME-RANKS.pt (values, gradients, parameters, metrics) for the test.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401 - before the fork

from rljob_api.manifest.algorithm import Algorithm, Optimizer
from rljob_api.manifest.algorithm import Critic as CriticSettings
from rljob_inputs.prompts import Prompt
from rljob_trainer.algorithms import rows as of_groups
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.episodes.types import Group, ScoredResult, TokenFacts, TrainRow, UpdateMetrics
from rljob_trainer.policy import sharding
from rljob_trainer.policy.critic import Critic
from rljob_trainer.policy.layout import MASKED_TREES, PLAIN, MicroBatch
from rljob_trainer.policy.model_loading import open_network
from rljob_trainer.policy.policy import Policy
from rljob_trainer.ranks.results import UpdateCounts, scatter_facts, split_facts, summarize_update
from tests.support import policy_scenarios
from tests.support.algorithms import algorithm_spec
from tests.support.episodes import episode
from tests.support.micro_batches import plan_micro_batches
from tests.support.policy_scenarios import FIRST, all_invalid, denominator
from tests.support.rank_programs import run_on_ranks

SETTINGS = CriticSettings(learning_rate=1e-3, value_clip=0.5)
HEAD = torch.linspace(-0.3, 0.3, 64)[None]
BIAS = torch.tensor([0.25])
PPO = Algorithm(type="ppo", critic=SETTINGS, optimizer=Optimizer(learning_rate=1e-3))
QUICK_PPO = Algorithm(type="ppo", critic=SETTINGS, optimizer=Optimizer(learning_rate=1e-2))
REDUCE_OFTEN = sharding.ShardingMode(keep_gathered=False, reduce_once=False)
CPU = torch.device("cpu")


def build_rows(seed: int = 0) -> list[TrainRow]:
    """Rows with targets and earlier values: some are near each other, others far enough for the clip."""
    draw = random.Random(seed)
    return [
        dataclasses.replace(
            row,
            returns=(row.loss_mask * draw.gauss(0, 1)).astype(np.float32),
            values=(row.loss_mask * draw.gauss(0, 1)).astype(np.float32),
        )
        for row in policy_scenarios.build_rows(seed, level="sequence")
    ]


class Scenarios:
    """All scenarios on one rank."""

    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        self.rank, self.num_ranks, self.folder = rank, num_ranks, folder

    def run(self) -> None:
        self.train("plain")
        self.train("accumulated", micro_batch_tokens=16, calls=3)
        self.train("unshared", share_prompts=False, mode=REDUCE_OFTEN)
        self.learn()
        self.train_policy()
        self.practise()

    def critic(self, mode: sharding.ShardingMode | None = None, *, has_head: bool = True) -> Critic:
        opened = open_network(str(self.folder / "model"), dtype=torch.float32, attention="sdpa", options={})
        mode = mode or sharding.ShardingMode(keep_gathered=True, reduce_once=True)
        mesh = sharding.build_mesh(CPU)
        critic = Critic(opened, SETTINGS, mesh=mesh, mode=mode, dtype=torch.float32, device=CPU)
        if has_head:  # a new head is zero, so no gradient would reach the decoder
            with torch.no_grad():
                for parameter, value in ((critic.model.head.weight, HEAD), (critic.model.head.bias, BIAS)):
                    parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))
        return critic

    def plan(self, rows: list[TrainRow], limit: int = 4096, share_prompts: bool = True) -> list[MicroBatch]:
        plans = plan_micro_batches(
            rows,
            num_ranks=self.num_ranks,
            micro_batch_tokens=limit,
            layout=MASKED_TREES if share_prompts else PLAIN,
            versions=FIRST,
        )
        return plans[self.rank]

    def train(
        self, name: str, *, micro_batch_tokens: int = 4096, share_prompts: bool = True, calls: int = 1, **settings: Any
    ) -> None:
        """Run one update in `calls` parts, and one without rows."""
        rows = build_rows()
        critic = self.critic(**settings)
        gradients = capture_gradients(critic)
        plan = self.plan(rows, micro_batch_tokens, share_prompts)
        values = critic.values(plan)
        for part in range(calls):
            critic.accumulate(self.plan(rows[part::calls], micro_batch_tokens, share_prompts))
        metrics = critic.apply(denominator(rows, "sequence"), 1e-3)
        parameters = full_parameters(critic)
        nothing = critic.apply(0, 1e-3)
        self.write(name, values=values, batches=plan, gradients=gradients, metrics=metrics, parameters=parameters,
                   nothing=nothing, after_nothing=full_parameters(critic))  # fmt: skip

    def learn(self) -> None:
        """Fit the returns, from a new head on. Some rows are masked."""
        rows = build_rows()
        rows = [*rows, *all_invalid(rows[:3])]
        critic = self.critic(has_head=False)
        first = critic.values(self.plan(rows))
        errors = []
        for _ in range(15):
            plan = self.plan(self.with_values(critic, rows))
            critic.accumulate(plan)
            errors.append(critic.apply(denominator(rows, "sequence"), 3e-3).squared_error)
        self.write("learned", errors=errors, first=first)

    def with_values(self, critic: Critic, rows: list[TrainRow]) -> list[TrainRow]:
        """Return rows with the critic's values, from all ranks."""
        plan = self.plan(rows)
        values = [torch.zeros(len(row.token_ids)) for row in rows]
        for batch, of_batch in zip(plan, critic.values(plan), strict=True):
            for row, position, value in zip(batch.rows, batch.positions, of_batch, strict=True):
                if batch.row_indices[row] >= 0:
                    values[batch.row_indices[row]][position] = value
        for row in values:
            dist.all_reduce(row)
        return [dataclasses.replace(row, values=value.numpy()) for row, value in zip(rows, values, strict=True)]

    def train_policy(self) -> None:
        """Train a policy with its critic."""
        policy = self.policy()
        values = [facts.values for facts in self.inspect(policy, build_rows())]
        first = self.update(policy, build_rows(1))
        trained = [facts.values for facts in self.inspect(policy, build_rows())]
        self.write("policy", values=values, trained=trained, metrics=first)

    def policy(self, algorithm: Algorithm = PPO) -> Policy:
        return policy_scenarios.Scenarios(self.rank, self.num_ranks, self.folder).policy(algorithm)

    def practise(self) -> None:
        """Reward small tokens: sample with the policy's weights, and update with all parts that the driver uses."""
        policy, sampler = self.policy(QUICK_PPO), AutoModelForCausalLM.from_pretrained(self.folder / "model")
        spec = algorithm_spec(type="ppo", groupSize=16)
        code, rewards, losses = build_algorithm(spec), [], []
        for step in range(12):
            weights = [policy.gather_weights()]
            dist.broadcast_object_list(weights)
            sampler.load_state_dict(weights[0], strict=False)
            group = sample_group(sampler, seed=step)
            facts = self.inspect(policy, of_groups.inspection_rows([group], code.settings))
            found = code.advantages(of_groups.episode_rewards([group], code.settings, facts))
            (rows,) = of_groups.build_rows([group], found, code.settings, facts)
            metrics = self.update(policy, rows, of_groups.denominator([group], code.settings))
            rewards.append(sum(episode.score or 0.0 for episode in group.episodes) / len(group.episodes))
            losses.append(metrics.critic_loss)
        self.write("practised", rewards=rewards, losses=losses)

    def inspect(self, policy: Policy, rows: list[TrainRow]) -> list[TokenFacts]:
        """Return what the driver gets."""
        plans = plan_micro_batches(rows, num_ranks=self.num_ranks, micro_batch_tokens=32)
        answers: list[Any] = [None] * self.num_ranks
        batches = plans[self.rank]
        dist.all_gather_object(answers, split_facts(batches, policy.inspect(batches)))
        return scatter_facts(rows, answers)

    def update(self, policy: Policy, rows: list[TrainRow], denominator: float = 12) -> UpdateMetrics:
        policy.accumulate(self.plan(rows))
        return summarize_update(policy.apply(denominator), UpdateCounts(), denominator)

    def write(self, name: str, **contents: Any) -> None:
        if self.rank == 0:
            torch.save(contents, self.folder / f"{name}-{self.num_ranks}.pt")


def sample_group(model: Any, seed: int) -> Group:
    """Return 16 episodes of 4 tokens, whose reward is the share of tokens below 64."""
    draw = torch.Generator().manual_seed(seed)
    group = Group(0, Prompt(0, "", [5, 6]))
    tokens = torch.tensor([[5, 6]] * 16)
    for _ in range(4):
        with torch.no_grad():
            chances = model(tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draw)], dim=1)
    with torch.no_grad():
        logprobs = model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[:, :, 0]
    for number, ids in enumerate(tokens.tolist()):
        score = sum(token < 64 for token in ids[2:]) / 4
        results = {"r0": ScoredResult(id="", valid=True, score=score)}
        known = [0.0, 0.0, *logprobs[number, 1:].tolist()]
        group.episodes.append(
            episode(
                ids, [0, 0, 1, 1, 1, 1], logprobs=known, version=3, index=(0, 0, number), score=score, results=results
            )
        )
    return group


def capture_gradients(critic: Critic) -> dict[str, torch.Tensor]:
    """Capture the clipped gradients of the optimizer's next step."""
    gradients: dict[str, torch.Tensor] = {}
    step = critic.optimizer.step

    def capture() -> None:
        gradients.update({n: p.grad.full_tensor().clone() for n, p in critic.model.named_parameters()})
        step()

    critic.optimizer.step = capture  # type: ignore[method-assign]
    return gradients


def full_parameters(critic: Critic | None) -> dict[str, torch.Tensor]:
    assert critic is not None
    critic.reshard()
    return {name: p.detach().full_tensor().clone() for name, p in critic.model.named_parameters()}


def build_inputs(_: int, folder: Path) -> None:
    policy_scenarios.build_model(folder / "model")


def main(folder: Path) -> None:
    run_on_ranks(folder, build_inputs, Scenarios)
