"""A task with rewards after every turn: credit by turn, against the same total given at the end of the episode.

A tabular policy answers up to 16 questions. A right answer to one of the first 12 is worth 1, later ones are worth
nothing, and each turn costs 0.1; after each answer the policy continues or stops. So it must learn the answers, and to
stop after the twelfth: a return of 10.8. Advantages and losses are RLOO's own code. Each estimator has the learning
rate, of those tried, with which its slowest seed reaches 90% of the best return first.

    turn      rewards of turns: returns to go, one leave-one-out baseline for each decision
    end       the sum of the same rewards as the episode's score
    centered  each turn's reward minus its mean over the group, then returns to go: biased (verl RFC 7244)

Prints a table and one JSON object, and writes docs/images/turn-credit.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from rljob_api.manifest.job import RLJobSpec
from rljob_inputs.models.defaults import resolve
from rljob_trainer.algorithms.advantages import returns_to_go, to_tokens
from rljob_trainer.algorithms.base import AlgorithmCode, EpisodeRewards, LossInputs
from rljob_trainer.algorithms.registry import build_algorithm

PLOT_PATH = Path(__file__).parents[1] / "docs/images/turn-credit.png"
MAX_TURNS, NUM_USEFUL = 16, 12
NUM_QUESTIONS, NUM_ANSWERS = 16, 8
TURN_COST = 0.1
BEST_RETURN = NUM_USEFUL * (1 - TURN_COST)
NUM_GROUPS, GROUP_SIZE = 2, 4
SEEDS = (0, 1, 2)
RATES = (0.05, 0.1, 0.2, 0.4)
TARGET = 0.9

Floats = NDArray[np.float64]
Estimator = Callable[[AlgorithmCode, Sequence[Sequence[Floats]]], list[list[Floats]]]
"""Rewards of turns to advantages of tokens.  [groups][episodes] of [turns] -> [groups][episodes] of [tokens]"""


class Policy:
    """Logits of an answer by question, and of continuing by turn. A turn's tokens are its answer and the decision."""

    def __init__(self) -> None:
        self.answers = torch.zeros(NUM_QUESTIONS, NUM_ANSWERS, requires_grad=True)
        self.continues = torch.full((MAX_TURNS,), 2.0, requires_grad=True)

    def sample(self, questions: NDArray[np.int64], draw: np.random.Generator) -> tuple[list[int], list[bool]]:
        """Return the answers and decisions of one episode."""
        with torch.no_grad():
            cumulative = self.answers.softmax(1).cumsum(1).numpy()[questions]
            continues = self.continues.sigmoid().numpy()
        answers: list[int] = []
        decisions: list[bool] = []
        for turn in range(MAX_TURNS):
            answer = int(np.searchsorted(cumulative[turn], draw.random()))
            answers.append(min(answer, NUM_ANSWERS - 1))
            decisions.append(bool(draw.random() < continues[turn]))
            if not decisions[-1]:
                break
        return answers, decisions

    def logprobs(self, questions: NDArray[np.int64], answers: list[int], decisions: list[bool]) -> torch.Tensor:
        """Return the log-probability of each token.  [2 x turns]"""
        count = len(answers)
        answer = self.answers.log_softmax(1)[torch.from_numpy(questions[:count]), torch.tensor(answers)]
        signs = torch.tensor(decisions) * 2.0 - 1.0
        decision = torch.nn.functional.logsigmoid(signs * self.continues[:count])
        return torch.stack([answer, decision], dim=1).flatten()

    def expected_return(self) -> float:
        """Return the exact mean. The right answer to question q is q modulo the number of answers."""
        with torch.no_grad():
            right = self.answers.softmax(1)[range(NUM_QUESTIONS), [q % NUM_ANSWERS for q in range(NUM_QUESTIONS)]]
            continues = self.continues.sigmoid()
        total, reached = 0.0, 1.0
        for turn in range(MAX_TURNS):
            total += reached * ((right.mean().item() if turn < NUM_USEFUL else 0.0) - TURN_COST)
            reached *= continues[turn].item()
        return total


def reward_turns(questions: NDArray[np.int64], answers: list[int]) -> Floats:
    right = np.array(answers) == questions[: len(answers)] % NUM_ANSWERS
    return np.where(np.arange(len(answers)) < NUM_USEFUL, right, 0.0) - TURN_COST


def turn_of_token(rewards: Floats) -> NDArray[np.int32]:
    return np.repeat(np.arange(len(rewards), dtype=np.int32), 2)


def by_turn(algorithm: AlgorithmCode, groups: Sequence[Sequence[Floats]]) -> list[list[Floats]]:
    return advantages(algorithm, groups, lambda rewards: EpisodeRewards(0.0, rewards.tolist(), turn_of_token(rewards)))


def at_end(algorithm: AlgorithmCode, groups: Sequence[Sequence[Floats]]) -> list[list[Floats]]:
    def as_score(rewards: Floats) -> EpisodeRewards:
        return EpisodeRewards(float(rewards.sum()), [0.0] * len(rewards), turn_of_token(rewards))

    return advantages(algorithm, groups, as_score)


def advantages(
    algorithm: AlgorithmCode, groups: Sequence[Sequence[Floats]], read: Callable[[Floats], EpisodeRewards]
) -> list[list[Floats]]:
    found = algorithm.advantages([[read(rewards) for rewards in group] for group in groups])
    return [[episode.advantages for episode in group if episode is not None] for group in found]


def centered(_: AlgorithmCode, groups: Sequence[Sequence[Floats]]) -> list[list[Floats]]:
    found = []
    for group in groups:
        means = [np.mean([r[turn] for r in group if len(r) > turn]) for turn in range(max(map(len, group)))]
        returns = [returns_to_go(rewards - means[: len(rewards)], 1.0) for rewards in group]
        found.append([to_tokens(of_turns, turn_of_token(of_turns)) for of_turns in returns])
    return found


ESTIMATORS: dict[str, Estimator] = {"turn": by_turn, "end": at_end, "centered": centered}
LABELS = {
    "turn": "rewards of turns, leave-one-out baseline for each decision",
    "end": "the same total at the end",
    "centered": "centered by turn, then added (biased)",
}


def build_rloo() -> AlgorithmCode:
    spec = {
        "model": {"source": "m"},
        "data": {"train": {"source": "d"}},
        "rewards": [{"name": "r", "function": {"file": "x"}}],
        "algorithm": {"type": "rloo", "groupSize": GROUP_SIZE},
    }
    return build_algorithm(resolve(RLJobSpec.model_validate(spec), None).spec)


def train(estimator: Estimator, rate: float, seed: int, num_steps: int) -> list[float]:
    """Return the exact mean return before each step and after the last."""
    draw, policy, algorithm = np.random.default_rng(seed), Policy(), build_rloo()
    optimizer = torch.optim.Adam([policy.answers, policy.continues], lr=rate)
    curve = [policy.expected_return()]
    for _ in range(num_steps):
        # A member of a group meets the same questions as the others, in the same order.
        prompts = draw.integers(NUM_QUESTIONS, size=(NUM_GROUPS, MAX_TURNS))
        sampled = [[policy.sample(questions, draw) for _ in range(GROUP_SIZE)] for questions in prompts]
        groups = [[reward_turns(q, answers) for answers, _ in group] for q, group in zip(prompts, sampled, strict=True)]
        of_tokens = [e for group in estimator(algorithm, groups) for e in group]
        logprobs = torch.cat(
            [policy.logprobs(q, *episode) for q, group in zip(prompts, sampled, strict=True) for episode in group]
        )
        inputs = LossInputs(
            logprobs,
            logprobs.detach(),
            logprobs.detach(),
            torch.from_numpy(np.concatenate(of_tokens)).float(),
            torch.zeros(len(logprobs), dtype=torch.int64),
            1,
        )
        optimizer.zero_grad()
        (algorithm.loss(inputs).per_token.sum() / (NUM_GROUPS * GROUP_SIZE)).backward()
        optimizer.step()
        curve.append(policy.expected_return())
    return curve


def steps_to_target(curve: Sequence[float]) -> int | None:
    return next((step for step, value in enumerate(curve) if value >= TARGET * BEST_RETURN), None)


def find_best(tried: dict[float, list[list[float]]]) -> float:
    """Return the learning rate whose slowest seed reaches the target first, else the one with the best end."""

    def rank(rate: float) -> tuple[float, float]:
        steps = [steps_to_target(curve) for curve in tried[rate]]
        slowest = max(len(tried[rate][0]) if step is None else step for step in steps)
        return slowest, -statistics.mean(curve[-1] for curve in tried[rate])

    return min(tried, key=rank)


def draw_curves(found: dict[str, tuple[float, list[list[float]]]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4))
    for color, (name, (rate, curves)) in zip(("#08519c", "#d94801", "#756bb1"), found.items(), strict=True):
        for number, curve in enumerate(curves):
            label = f"{LABELS[name]}; learning rate {rate:g}" if number == 0 else None
            axis.plot(curve, color=color, lw=1.2, label=label)
    axis.axhline(BEST_RETURN, color="black", lw=0.6, ls=":")
    axis.axhline(TARGET * BEST_RETURN, color="gray", lw=0.6, ls="--")
    axis.set_xlabel("step")
    axis.set_ylabel("exact mean return")
    axis.set_ylim(bottom=0)
    axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--plot", type=Path, default=PLOT_PATH)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tried = {
        name: {rate: [train(estimator, rate, seed, arguments.steps) for seed in SEEDS] for rate in RATES}
        for name, estimator in ESTIMATORS.items()
    }
    best = {name: find_best(curves) for name, curves in tried.items()}
    found = {name: (rate, tried[name][rate]) for name, rate in best.items()}
    results = {
        name: {
            "learning_rate": rate,
            "steps_to_target": [steps_to_target(curve) for curve in curves],
            "last_return": [round(curve[-1], 2) for curve in curves],
        }
        for name, (rate, curves) in found.items()
    }
    table = Table("estimator", "learning rate", f"steps to {TARGET:.0%}", "return at the end", title="Seeds 0, 1, 2")
    for name, row in results.items():
        table.add_row(LABELS[name], *map(str, row.values()))
    Console(width=120).print(table)
    draw_curves(found, arguments.plot)
    by_rate = {
        name: {rate: [steps_to_target(curve) for curve in curves] for rate, curves in of_rates.items()}
        for name, of_rates in tried.items()
    }
    print(json.dumps({"best_return": BEST_RETURN, **results, "steps_by_learning_rate": by_rate}))


if __name__ == "__main__":
    main()
