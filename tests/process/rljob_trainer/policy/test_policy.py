"""Updates on real FSDP2 ranks, compared with an independent computation in plain torch, and with each other.

policy_scenarios.py runs each scenario with one rank and with two; each test compares their results.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rljob_api.manifest.algorithm import Algorithm
from rljob_trainer.episodes.types import TrainSample
from tests.paths import ROOT
from tests.support import policy_scenarios

PROGRAM = ROOT / "tests" / "support" / "policy_scenarios.py"
DEADLINE_SECONDS = 400


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: threads would only wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)],
        env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Callable[[str, int], dict[str, Any]]:
    return lambda name, num_ranks: torch.load(folder / f"{name}-{num_ranks}.pt", weights_only=False)


class ReferenceTrainer:
    """The independent computation: one sequence at a time, all logits, and autograd."""

    def __init__(self, folder: Path, algorithm: Algorithm, temperature: float = 1.0) -> None:
        from transformers import AutoModelForCausalLM

        def load() -> Any:
            return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)

        self.model, self.reference = load(), load().requires_grad_(False)
        self.algorithm, self.temperature = algorithm, temperature

    def logprobs(self, model: Any, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        every = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1] / self.temperature, dim=-1)
        return every.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], -(every.exp() * every).sum(-1)

    def loss(self, samples: list[TrainSample]) -> torch.Tensor:
        a, total, num_tokens = self.algorithm, torch.zeros(()), sum(sum(s.loss_mask) for s in samples)
        for s in samples:
            mask = torch.tensor(s.loss_mask[1:], dtype=torch.float32)
            new, entropy = self.logprobs(self.model, s.token_ids)
            old = new.detach() if s.old_logprobs is None else torch.tensor(s.old_logprobs[1:])
            ratio = torch.exp(new - old)
            gain = torch.minimum(ratio * s.advantage, ratio.clip(1 - a.clip_low, 1 + a.clip_high) * s.advantage)
            if a.importance_cap:
                gain = gain * torch.exp(old - torch.tensor(s.rollout_logprobs[1:])).clip(max=a.importance_cap)
            kl = self.logprobs(self.reference, s.token_ids)[0] - new
            per_token = -gain + a.kl.coefficient * (kl.exp() - 1 - kl) - a.entropy_coefficient * entropy
            share = num_tokens if a.loss_level == "token" else len(samples) * mask.sum()
            total = total + (per_token * mask).sum() / share
        return total

    def gradients(self, samples: list[TrainSample]) -> tuple[float, dict[str, torch.Tensor], float]:
        """Return the loss, the clipped gradients by name, and the norm before the clip."""
        self.model.zero_grad()
        loss = self.loss(samples)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.algorithm.optimizer.max_grad_norm)
        return loss.item(), {name: p.grad for name, p in self.model.named_parameters()}, norm.item()


CASES = {
    "plain": "plain",
    "accumulated": "plain",
    "unshared": "plain",
    "recomputed": "plain",
    "everything": "everything",
    "everything-accumulated": "everything",
}
"""Reference computation of each scenario."""


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, tuple[float, dict[str, torch.Tensor], float]]:
    everything = ReferenceTrainer(folder, policy_scenarios.EVERYTHING, temperature=0.7)
    return {
        "plain": ReferenceTrainer(folder, policy_scenarios.PLAIN).gradients(policy_scenarios.build_samples()),
        "everything": everything.gradients(policy_scenarios.build_samples(with_old=True)),
    }


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_an_independent_computation(name, num_ranks, references, outcome):
    loss, gradients, norm = references[CASES[name]]
    ours = outcome(name, num_ranks)
    assert ours["metrics"][0].sums["loss"] == pytest.approx(loss, abs=1e-5)
    assert ours["metrics"][0].grad_norm == pytest.approx(norm, abs=1e-5)
    assert ours["gradients"].keys() == gradients.keys(), "a tied parameter counts once"
    for key, gradient in gradients.items():
        difference = ours["gradients"][key] - gradient
        assert difference.abs().max() < 1e-5, key
        assert difference.norm() < 1e-4 * gradient.norm(), f"{key}: small gradients must be right, too"


def test_ranks_accumulation_sharing_and_recomputation_do_not_change_the_update(outcome):
    expected = outcome("plain", 1)["parameters"]
    for name in ("plain", "accumulated", "unshared", "recomputed"):
        for num_ranks in (1, 2):
            assert_same_parameters(outcome(name, num_ranks)["parameters"], expected, f"{name}, {num_ranks} ranks")
    assert_same_parameters(
        outcome("everything-accumulated", 2)["parameters"], outcome("everything", 1)["parameters"], "everything"
    )


def assert_same_parameters(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], what: str) -> None:
    """Compare within 1% of one step of Adam (1e-3). Adam divides by the gradient's size, so rounding of a gradient near
    0 can reverse its step: one parameter in a thousand may differ."""
    assert ours.keys() == theirs.keys()
    num_wrong = sum(int(((ours[k] - theirs[k]).abs() > 1e-5).sum()) for k in ours)
    assert num_wrong <= 1e-3 * sum(p.numel() for p in ours.values()), f"{what}: {num_wrong} parameters differ"


def test_invalid_samples_do_not_change_the_update(outcome):
    for num_ranks in (1, 2):
        masked, left_out = outcome("masked", num_ranks), outcome("plain", num_ranks)
        assert masked["metrics"] == left_out["metrics"]
        for key, parameter in left_out["parameters"].items():
            assert torch.equal(masked["parameters"][key], parameter), key


def test_mini_batch_of_invalid_samples_changes_nothing(outcome, folder):
    nothing = outcome("nothing", 2)
    initial = ReferenceTrainer(folder, Algorithm()).model.state_dict()
    assert nothing["metrics"][0].sums["num_tokens"] == 0
    for key, parameter in nothing["parameters"].items():
        assert torch.equal(parameter, initial[key]), key


def test_logprobs_of_shared_rows_equal_those_of_separate_sequences(outcome, folder):
    measured, samples = outcome("measured", 2), policy_scenarios.build_samples()
    expected_policy = ReferenceTrainer(folder, policy_scenarios.PLAIN)
    with torch.no_grad():
        expected = [expected_policy.logprobs(expected_policy.model, sample.token_ids)[0] for sample in samples]
    for values, batch in zip(measured["logprobs"], measured["batches"], strict=True):
        for value, sample, position in zip(values, batch.samples, batch.positions, strict=True):
            assert value.item() == pytest.approx(expected[sample][position - 1].item(), abs=1e-5)


def test_published_weights_have_the_compute_dtype_and_tied_heads_once(outcome):
    published = outcome("measured", 2)["published"]
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    assert "model.embed_tokens.weight" in published
    assert "lm_head.weight" not in published


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_resume_from_a_checkpoint_repeats_the_run_bit_for_bit(num_ranks, outcome):
    resumed = outcome("resumed", num_ranks)
    assert resumed["counts"] == (3, 3)
    for key, parameter in resumed["uninterrupted"].items():
        assert torch.equal(resumed["resumed"][key], parameter), key


def test_checkpoint_of_one_rank_resumes_with_two(outcome):
    assert_same_parameters(outcome("other-size", 2)["resumed"], outcome("resumed", 1)["uninterrupted"], "1 to 2 ranks")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_export_is_a_complete_model_folder_with_readable_files(num_ranks, folder, outcome):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = folder / f"export-{num_ranks}"
    model = AutoModelForCausalLM.from_pretrained(export)
    assert len(AutoTokenizer.from_pretrained(export)) == 256
    expected = outcome("resumed", num_ranks)["resumed"]
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[key]), key
    assert {path.stat().st_mode & 0o777 for path in export.iterdir()} == {0o644}
    assert not list(folder.glob(".export*")), "no partial folder remains"
