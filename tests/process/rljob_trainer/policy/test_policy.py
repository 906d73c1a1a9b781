"""Updates on real FSDP2 ranks, compared with an independent computation in plain torch, and with each other.

policy_scenarios.py runs each scenario with one rank and with two; each test compares their results.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from rljob_api.manifest.algorithm import Algorithm
from rljob_trainer.run_folder.client import EXPORT_PARTIAL
from rljob_trainer.run_folder.server import RunFileServer
from tests.support import policy_scenarios
from tests.support.loopback import next_address
from tests.support.rank_programs import run_forked
from tests.support.reference_trainer import ReferenceTrainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `head-RANKS`: the folder of a run that the ranks do not see."""
    folder = tmp_path_factory.mktemp("policy")
    with contextlib.ExitStack() as stack:
        for num_ranks in (1, 2):
            (run := folder / f"head-{num_ranks}").mkdir()
            server = RunFileServer(run, next_address(), policy_scenarios.HEAD_TOKEN)
            stack.callback(server.close)
            (folder / f"url-{num_ranks}").write_text(server.folder.url)
        return run_forked(policy_scenarios.__name__, folder)


CASES = {
    "plain": "plain",
    "accumulated": "plain",
    "reduced": "plain",
    "unshared": "plain",
    "recomputed": "plain",
    "split": "plain",
    "without-signal": "without-signal",
    "everything": "everything",
    "everything-accumulated": "everything",
    "everything-split": "everything",
    "given-reference": "given-reference",
    "taught": "taught",
    **{name: name for name in policy_scenarios.OTHERS},
}
"""Reference computation of each scenario."""


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, tuple[float, dict[str, torch.Tensor], float]]:
    plain = ReferenceTrainer(folder, policy_scenarios.PLAIN)
    everything = ReferenceTrainer(folder, policy_scenarios.EVERYTHING)
    rows, later = policy_scenarios.build_rows(), policy_scenarios.LATER
    heated = policy_scenarios.at_temperatures
    others = {
        name: ReferenceTrainer(
            folder, Algorithm.model_validate({**settings, "optimizer": policy_scenarios.OPTIMIZER})
        ).gradients(policy_scenarios.build_rows(level="sequence"), later, "sequence")
        for name, settings in policy_scenarios.OTHERS.items()
    }
    return {
        **others,
        "plain": plain.gradients(rows),
        "taught": plain.gradients(policy_scenarios.with_top(rows)),
        "without-signal": plain.gradients(policy_scenarios.without_advantages(rows, policy_scenarios.NO_SIGNAL)),
        "everything": everything.gradients(heated(policy_scenarios.build_rows(level="sequence")), later, "sequence"),
        "given-reference": everything.gradients(heated(policy_scenarios.with_reference(rows)), later),
    }


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [(name, n) for name in CASES for n in (1, 2) if n == 2 or name not in policy_scenarios.OTHERS],
)
def test_loss_and_gradients_equal_an_independent_computation(name, num_ranks, references, outcome):
    loss, gradients, norm = references[CASES[name]]
    ours = outcome(name, num_ranks)
    assert ours["metrics"][0].loss == pytest.approx(loss, abs=1e-5)
    assert ours["metrics"][0].grad_norm == pytest.approx(norm, abs=1e-5)
    assert ours["gradients"].keys() == gradients.keys(), "a tied parameter counts once"
    for key, gradient in gradients.items():
        difference = ours["gradients"][key] - gradient
        assert difference.abs().max() < 1e-5, key
        assert difference.norm() < 1e-4 * gradient.norm(), f"{key}: small gradients must be right, too"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_warm_start_has_the_loss_and_gradients_of_the_cross_entropy(num_ranks, folder, outcome):
    """By transformers' own loss: labels are -100 where nothing trains. The job's KL penalty, entropy bonus and
    corrections do not apply."""
    model = ReferenceTrainer(folder, policy_scenarios.PLAIN).model
    rows = policy_scenarios.given_rows()
    total, count = torch.zeros(()), sum(int(row.loss_mask.sum()) for row in rows)
    for row in rows:
        ids = torch.tensor([row.token_ids.tolist()])
        labels = ids.masked_fill(~torch.from_numpy(row.loss_mask)[None], -100)
        total = total + model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(count)).loss
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    ours = outcome("warm", num_ranks)
    metrics = ours["metrics"]
    assert metrics[0].loss == pytest.approx(total.item(), abs=1e-6)
    assert metrics[0].grad_norm == pytest.approx(norm.item(), abs=1e-5)
    for key, parameter in model.named_parameters():
        assert (ours["gradients"][key] - parameter.grad).abs().max() < 1e-6, key
    assert [each.learning_rate for each in metrics] == [5e-3, 5e-3]
    assert metrics[1].loss < metrics[0].loss
    assert outcome("warm-critic", num_ranks)["metrics"][0].critic_loss is None


def test_weights_of_sequences_are_truncated_and_some_are_rejected(outcome):
    [metrics, *_] = outcome("corrected", 2)["metrics"]
    assert 0.1 < metrics.corrected_share < 0.9, "otherwise the comparison shows little"
    assert 0.1 < metrics.rejected_share < 0.9


@pytest.mark.parametrize("name", ["half", "half-fp32-head"])
def test_gradients_in_float16_are_close(name, references, outcome):
    """Scaled for the backward pass, and back before the clip."""
    _, gradients, norm = references["plain"]
    ours = outcome(name, 2)
    assert ours["metrics"][0].grad_norm == pytest.approx(norm, rel=0.02)
    for key, gradient in gradients.items():
        assert (ours["gradients"][key] - gradient).norm() < 0.05 * gradient.norm(), key


def test_logits_in_fp32_change_what_float16_computes(outcome):
    mismatches = {name: outcome(name, 1)["metrics"][0].mismatch_max for name in ("plain", "half", "half-fp32-head")}
    assert len(set(mismatches.values())) == 3


def test_ranks_accumulation_sharing_and_recomputation_do_not_change_the_update(outcome):
    expected = outcome("plain", 1)["parameters"]
    for name in ("plain", "accumulated", "reduced", "unshared", "recomputed", "split"):
        for num_ranks in (1, 2):
            assert_same_parameters(outcome(name, num_ranks)["parameters"], expected, f"{name}, {num_ranks} ranks")
    for name in ("everything-accumulated", "everything-split"):
        assert_same_parameters(outcome(name, 2)["parameters"], outcome("everything", 1)["parameters"], name)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_same_calls_of_an_update_give_the_same_bits(num_ranks, outcome):
    first, second = outcome("split", num_ranks), outcome("split-again", num_ranks)
    assert first["metrics"] == second["metrics"]
    for key, parameter in first["parameters"].items():
        assert torch.equal(second["parameters"][key], parameter), key


def test_metrics_do_not_depend_on_ranks_or_calls(outcome):
    expected = vars(outcome("everything", 1)["metrics"][0])
    for name in ("everything", "everything-accumulated", "everything-split"):
        found = vars(outcome(name, 2)["metrics"][0])
        for key in expected.keys() - {"num_micro_batches", "seconds"}:
            assert found[key] == pytest.approx(expected[key], abs=2e-5), (name, key)


def test_gradients_are_whole_on_a_rank_only_where_they_fit(outcome):
    """Between calls never, and between the micro-batches of a call in the faster mode alone."""
    assert max(outcome("accumulated", 2)["held"]) > 0, "the micro-batches add up on each rank"
    assert set(outcome("reduced", 2)["held"]) == {0}
    assert set(outcome("split", 2)["held"]) == {0}


def test_update_with_a_gradient_that_is_not_finite_is_left_out_and_reported(outcome):
    for num_ranks in (1, 2):
        skipped = outcome("skipped", num_ranks)
        assert skipped["metrics"].is_skipped
        assert not skipped["next"].is_skipped
        assert skipped["next"].grad_norm > 0
        assert skipped["num_updates"] == 2, "it counts for the learning rate"
        for key, parameter in skipped["before"].items():
            assert torch.equal(skipped["after"][key], parameter), key


def test_rows_without_advantage_are_left_out_of_the_forward_pass(outcome):
    plain, ours = outcome("plain", 2)["metrics"][0], outcome("without-signal", 2)["metrics"][0]
    rows = policy_scenarios.build_rows()
    left_out = sum(rows[i].loss_mask.sum() for i in policy_scenarios.NO_SIGNAL)
    assert (plain.trained_share, ours.num_tokens) == (1.0, plain.num_tokens)
    assert ours.trained_share == pytest.approx(1 - left_out / plain.num_tokens)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_update_without_any_signal_equals_one_with_gradients_of_zero(num_ranks, outcome):
    """The moments of Adam decay in both."""
    rest = outcome("rest", num_ranks)
    for key, parameter in rest["with_zeros"].items():
        assert torch.equal(rest["without_forward"][key], parameter), key


def test_policy_and_reference_model_are_measured_and_sharded_again(outcome, folder):
    for num_ranks in (1, 2):
        inspected, rows = outcome("inspected", num_ranks), policy_scenarios.build_rows()
        assert inspected["is_sharded"]
        trainer = ReferenceTrainer(folder, policy_scenarios.PLAIN)
        with torch.no_grad():
            expected = [trainer.logprobs(trainer.reference, row)[0] for row in rows]
        scored = [facts.logprobs for facts in inspected["scored"]]
        for facts, score, row, own in zip(inspected["facts"], scored, rows, expected, strict=True):
            for ours in (facts.reference_logprobs, score):
                wanted = own * torch.from_numpy(row.loss_mask[1:])
                assert torch.allclose(torch.from_numpy(ours)[1:], wanted, atol=1e-5)
            assert facts.values is None


def assert_same_parameters(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], what: str) -> None:
    """Compare within 1% of one step of Adam (1e-3). Adam divides by the gradient's size, so rounding of a gradient near
    0 can reverse its step: one parameter in a thousand may differ."""
    assert ours.keys() == theirs.keys()
    num_wrong = sum(int(((ours[k] - theirs[k]).abs() > 1e-5).sum()) for k in ours)
    assert num_wrong <= 1e-3 * sum(p.numel() for p in ours.values()), f"{what}: {num_wrong} parameters differ"


def test_invalid_rows_do_not_change_the_update(outcome):
    for num_ranks in (1, 2):
        masked, left_out = outcome("masked", num_ranks), outcome("plain", num_ranks)
        assert masked["metrics"] == left_out["metrics"]
        for key, parameter in left_out["parameters"].items():
            assert torch.equal(masked["parameters"][key], parameter), key


def test_mini_batch_of_invalid_rows_changes_nothing(outcome, folder):
    nothing = outcome("nothing", 2)
    initial = ReferenceTrainer(folder, Algorithm()).model.state_dict()
    assert nothing["metrics"][0].num_tokens == 0
    assert not nothing["metrics"][0].is_skipped
    for key, parameter in nothing["parameters"].items():
        assert torch.equal(parameter, initial[key]), key


def test_published_weights_have_the_compute_dtype_and_tied_heads_once(outcome):
    published = outcome("published", 2)["weights"]
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    assert "model.embed_tokens.weight" in published
    assert "lm_head.weight" not in published


def test_streamed_weights_are_as_described_before_and_after_the_first_update(outcome):
    found = outcome("published", 2)
    assert found["has_plain_matrices"]
    for streamed in (found["initial"], found["streamed"]):
        assert streamed.keys() == found["described"].keys()
        for name, tensor in streamed.items():
            described = found["described"][name]
            assert (tensor.shape, tensor.dtype) == (described.shape, described.dtype), name
    for name, tensor in found["weights"].items():
        assert torch.equal(found["streamed"][name], tensor), name


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_files_through_the_head_are_those_of_a_folder_that_ranks_see(num_ranks, folder):
    """A driver, `rljob run` or vLLM finds what it expects, whichever rank has written it."""
    head = folder / f"head-{num_ranks}"
    for sent, written in (
        (head / "checkpoints/step-000001", folder / f"checkpoint-{num_ranks}"),
        (head / EXPORT_PARTIAL, folder / f"export-{num_ranks}"),
    ):
        sizes = [{path.relative_to(at): path.stat().st_size for path in at.rglob("*")} for at in (sent, written)]
        assert sizes[0].keys() == sizes[1].keys()
        assert all(sizes[0][name] == size for name, size in sizes[1].items() if name.suffix in (".distcp", ".json"))
    weights = (head / EXPORT_PARTIAL / "model.safetensors").read_bytes()
    assert weights == (folder / f"export-{num_ranks}" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_export_is_a_complete_model_folder_with_readable_files(num_ranks, folder, outcome):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = folder / f"export-{num_ranks}"
    model = AutoModelForCausalLM.from_pretrained(export)
    assert len(AutoTokenizer.from_pretrained(export)) == 256
    expected = outcome("saved", num_ranks)["weights"]
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[key]), key
    assert {path.stat().st_mode & 0o777 for path in export.iterdir()} == {0o644}
