"""The critic on real FSDP2 ranks, compared with an independent computation in plain torch.

critic_scenarios.py runs each scenario with one rank and with two; each test compares their results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rljob_trainer.episodes.types import TrainRow
from tests.support import critic_scenarios
from tests.support.critic_scenarios import BIAS, HEAD
from tests.support.rank_programs import run_forked

NAMES = ["plain", "accumulated", "unshared"]
CLIP = 0.5
MAX_NORM = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_forked(critic_scenarios.__name__, tmp_path_factory.mktemp("critic"))


class PlainCritic:
    """One sequence at a time, in plain torch."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel

        self.decoder = AutoModel.from_pretrained(folder / "model", dtype=torch.float32)
        self.head = torch.nn.Parameter(HEAD.clone())
        self.bias = torch.nn.Parameter(BIAS.clone())

    def values(self, tokens: Any) -> torch.Tensor:
        """The value before each token but the first."""
        hidden = self.decoder(torch.tensor(tokens)[None]).last_hidden_state[0, :-1]
        return (hidden @ self.head.T + self.bias)[:, 0]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        decoder = {f"network.{name}": parameter for name, parameter in self.decoder.named_parameters()}
        return {**decoder, "head.weight": self.head, "head.bias": self.bias}


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    rows, plain = critic_scenarios.build_rows(), PlainCritic(folder)
    values, squared, clipped, total, num_clipped, num_tokens = [], 0.0, 0.0, torch.zeros(()), 0, 0
    for row in rows:
        mask = torch.from_numpy(row.loss_mask)[1:]
        value = plain.values(row.token_ids)[mask]
        before, returns = torch.from_numpy(row.values)[1:][mask], torch.from_numpy(row.returns)[1:][mask]
        free = 0.5 * (value - returns) ** 2
        bounded = 0.5 * (before + torch.clip(value - before, -CLIP, CLIP) - returns) ** 2
        error = torch.max(free, bounded)
        total = total + error.mean() / len(rows)
        values.append(value.detach())
        squared += 2 * free.sum().item()
        clipped += error.sum().item()
        num_clipped += int((bounded > free).sum())
        num_tokens += len(value)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters().values(), MAX_NORM).item()
    assert 0 < num_clipped < num_tokens, "the case must be met"
    return {
        "values": values,
        "gradients": {name: parameter.grad for name, parameter in plain.parameters().items()},
        "norm": norm,
        "squared_error": squared / num_tokens,
        "loss": clipped / num_tokens,
        "clip_fraction": num_clipped / num_tokens,
    }


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_metrics_equal_an_independent_computation(name, num_ranks, expected, outcome):
    ours = outcome(name, num_ranks)
    assert ours["metrics"].grad_norm == pytest.approx(expected["norm"], rel=1e-5)
    for metric in ("loss", "squared_error", "clip_fraction"):
        assert getattr(ours["metrics"], metric) == pytest.approx(expected[metric], abs=1e-5), metric
    assert ours["gradients"].keys() == expected["gradients"].keys()
    for key, gradient in expected["gradients"].items():
        difference = ours["gradients"][key] - gradient
        assert difference.abs().max() < 1e-5, key
        assert difference.norm() < 1e-4 * gradient.norm(), f"{key}: small gradients must be right, too"


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_before_each_sampled_token(name, expected, outcome):
    ours, rows = outcome(name, 1), critic_scenarios.build_rows()
    for values, batch in zip(ours["values"], ours["batches"], strict=True):
        for value, row, position in zip(values, batch.rows, batch.positions, strict=True):
            index = batch.row_indices[row]
            first = int(rows[index].loss_mask.argmax())
            assert value.item() == pytest.approx(expected["values"][index][position - first].item(), abs=1e-5)


def test_ranks_and_accumulation_do_not_change_the_update(outcome):
    reference = outcome("plain", 1)["parameters"]
    for name in NAMES:
        for num_ranks in (1, 2):
            parameters = outcome(name, num_ranks)["parameters"]
            wrong = sum(int(((parameters[k] - reference[k]).abs() > 1e-5).sum()) for k in reference)
            # Adam divides by the gradient's size, so rounding of a gradient near 0 can reverse its step.
            assert wrong <= 1e-3 * sum(p.numel() for p in reference.values()), f"{name}, {num_ranks} ranks"


def test_update_without_tokens_changes_nothing(outcome):
    ours = outcome("plain", 2)
    assert ours["nothing"].loss == ours["nothing"].grad_norm == 0
    for key, parameter in ours["parameters"].items():
        assert torch.equal(ours["after_nothing"][key], parameter), key


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_critic_starts_at_zero_and_learns_the_targets(num_ranks, outcome):
    learned = outcome("learned", num_ranks)
    assert all((values == 0).all() for values in learned["first"])
    errors = learned["errors"]
    assert errors[-1] < 0.4 * errors[0], "completions of one prompt start from the same state, so not to 0"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_policy_reports_the_values_of_its_critic_and_trains_it(num_ranks, outcome):
    ours = outcome("policy", num_ranks)
    for row, before, after in zip(critic_scenarios.build_rows(), ours["values"], ours["trained"], strict=True):
        assert (before == 0).all(), "a new head is zero"
        assert ((after != 0) == row.loss_mask).all()
    rows = critic_scenarios.build_rows(1)
    errors = [bounded_error(0.0, *pair) for row in rows for pair in zip(*sampled(row), strict=True)]
    assert ours["metrics"].critic_loss == pytest.approx(sum(errors) / len(errors), abs=1e-5)


def sampled(row: TrainRow) -> tuple[list[float], list[float]]:
    """The values before the update, and the targets."""
    return row.values[row.loss_mask].tolist(), row.returns[row.loss_mask].tolist()


def bounded_error(value: float, before: float, target: float) -> float:
    bounded = min(max(value, before - CLIP), before + CLIP)
    return 0.5 * max((value - target) ** 2, (bounded - target) ** 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_policy_and_critic_learn_from_sampled_episodes(num_ranks, outcome):
    practised = outcome("practised", num_ranks)
    rewards, losses = practised["rewards"], practised["losses"]
    assert sum(rewards[:3]) / 3 < 0.4, "one token in four is below 64"
    assert sum(rewards[-3:]) / 3 > 0.5, rewards
    assert max(losses) < 0.25, "the values follow the rewards, which rise from 0.25"
