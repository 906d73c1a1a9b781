"""Memory that a job names and does not have: errors where it surely cannot fit, warnings where the data decides."""

from __future__ import annotations

import json

import pytest
import yaml
from memory_plan.cases import QWEN25_1B5, QWEN25_7B, SMOLLM2_135M
from typer.testing import CliRunner

from rljob_cli.check.jobfile import load
from rljob_cli.check.memory import build_question, check_memory
from rljob_cli.main import app
from rljob_inputs.check import InputsReport
from rljob_inputs.data.lengths import PromptLimit, measure
from tests.support.model_folder import write_model

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
GPUS = {
    "gpusPerReplica": 4,
    "gradientCheckpointing": "none",
    "nodePool": {"nodeSelector": {"nvidia.com/gpu.memory": "22000"}},
}


def write_job(folder, config, **spec):
    write_model(folder / "model", config)
    (folder / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (folder / "reward.py").write_text(REWARD)
    spec = {
        "model": {"source": "./model"},
        "data": {"train": {"source": "train.jsonl", "prompt": "question"}},
        "rewards": [{"name": "r", "function": {"file": "reward.py"}}],
        **spec,
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    return folder / "job.yaml"


def find(path, config):
    job = load(path).job
    inputs = InputsReport(model_configs={"spec.model.source": config})
    return [(each.path, each.is_warning, each.message) for each in check_memory(build_question(job, inputs))]


def run(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def test_weights_and_gradients_above_the_memory_of_the_gpus_are_an_error(tmp_path):
    ((path, is_warning, message),) = find(write_job(tmp_path, QWEN25_7B, trainer=GPUS), QWEN25_7B)
    assert (path, is_warning) == ("spec.trainer", False)
    assert message.startswith("a GPU of trainer needs at least 34.9 GiB, and ")
    assert "a GPU gives it 21.5 GiB; what takes less: fewer trainer.microBatchTokens, " in message


def test_activations_above_the_memory_of_the_gpus_are_a_warning(tmp_path):
    gpus = {**GPUS, "nodePool": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}}
    rollout = {"sampling": {"maxTokens": 4096}}
    ((path, is_warning, message),) = find(write_job(tmp_path, QWEN25_7B, trainer=gpus, rollout=rollout), QWEN25_7B)
    assert (path, is_warning) == ("spec.trainer", True)
    assert message.startswith("a GPU of trainer may need ")
    assert "what takes less: fewer trainer.microBatchTokens, trainer.gradientCheckpointing: full, " in message


@pytest.mark.parametrize(
    ("measured", "longest"),
    [
        ({"spec.data.train": 50, "spec.data.mix[0]": 900, "spec.evaluation.sets[0].data": 2000}, 900),
        ({"spec.data.train": 50, "spec.evaluation.sets[0].data": 20}, None),  # of mix[0] only some rows were read
        ({"spec.evaluation.sets[0].data": 20}, None),
    ],
)
def test_longest_prompt_is_that_of_all_sources_of_training_alone(tmp_path, measured, longest):
    mix = [{"name": "more", "source": "train.jsonl", "prompt": "question"}]
    data = {"train": {"source": "train.jsonl", "prompt": "question"}, "mix": mix}
    job = load(write_job(tmp_path, SMOLLM2_135M, data=data)).job
    inputs = InputsReport(lengths=[measure([length], path, 1, PromptLimit()) for path, length in measured.items()])
    assert build_question(job, inputs).max_prompt_tokens == longest


def test_a_limit_below_the_plan_is_reported_with_both_numbers(tmp_path):
    trainer = {"resources": {"limits": {"memory": "1Gi"}}}
    ((path, is_warning, message),) = find(write_job(tmp_path, SMOLLM2_135M, trainer=trainer), SMOLLM2_135M)
    assert path == "spec.trainer.resources.limits.memory"
    assert not is_warning, "weights and optimizer alone have more"
    assert "resources.limits.memory is 1.0 GiB" in message
    assert "; what fits: resources.limits.memory: 17Gi" in message


def test_a_job_that_names_no_memory_has_no_findings(tmp_path):
    assert find(write_job(tmp_path, QWEN25_7B, trainer={"gpusPerReplica": 4}), QWEN25_7B) == []


def test_plan_prints_each_role_with_its_parts(tmp_path):
    code, output = run("plan", write_job(tmp_path, SMOLLM2_135M))
    assert code == 0
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert lines[1] == "ROLE COUNT PART NEEDS HAS"
    assert "rollout 1 x Pod at serve 4.0 GiB" in lines
    assert "KV cache 1.0 GiB" in lines


def test_plan_fails_with_what_would_fit_on_the_given_gpu(tmp_path):
    job = write_job(tmp_path, QWEN25_7B, trainer={"gpusPerReplica": 4})
    assert run("plan", job)[0] == 0, "without a known GPU, it prints needs"
    code, output = run("plan", job, "--gpu", "l4")
    assert code == 2
    assert "DOES NOT FIT" in output
    assert "spec.trainer: a GPU of trainer needs at least" in output


def test_plan_counts_the_gpus_and_says_how_fewer_are_enough(tmp_path):
    gpus = {"trainer": {"gpusPerReplica": 2}, "rollout": {"replicas": 2, "gpusPerReplica": 1}}
    job = write_job(tmp_path, SMOLLM2_135M, **gpus)
    code, output = run("plan", job, "--gpu", "l4")
    assert (code, "takes 4 GPUs in all: 2 by spec.trainer, 2 by spec.rollout" in output) == (0, True)
    code, output = run("plan", job, "--gpu", "l4", "--gpus", 2)
    assert code == 2
    *_, line = output.splitlines()
    assert line == (
        "spec.trainer.gpusPerReplica: the job takes 4 GPUs, --gpus is 2; "
        "what fits: rollout.placement: trainer, without rollout.replicas"
    )


def test_plan_of_a_shared_gpu_has_all_phases_once(tmp_path):
    trainer = {"gpusPerReplica": 1, "gradientCheckpointing": "full"}
    shared = {"trainer": trainer, "rollout": {"placement": "trainer", "gpusPerReplica": 1}}
    job = write_job(tmp_path, SMOLLM2_135M, **shared)
    code, output = run("plan", job, "--gpu", "l4", "--gpus", 1)
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert code == 0
    assert [line.split()[1] for line in lines if line.startswith("at ")] == ["update", "publish"]
    assert any(line.startswith("trainer 1 x GPU at generate") for line in lines)
    assert any(line.startswith("rollout the same GPU at serve") for line in lines)
    assert "takes 1 GPU in all: 1 by spec.trainer; trainer and rollouts share theirs, in turns" in lines
    (file,) = json.loads(run("plan", job, "--gpu", "l4", "-o", "json")[1])["files"]
    need = next(need for need in file["needs"] if (need["role"], need["resource"]) == ("trainer", "gpu"))
    assert (file["gpus"], need["peak"]) == (1, "generate")


def test_plan_as_json_has_all_moments_in_bytes(tmp_path):
    code, output = run("plan", write_job(tmp_path, SMOLLM2_135M), "-o", "json")
    (file,) = json.loads(output)["files"]
    trainer = next(need for need in file["needs"] if need["role"] == "trainer")
    assert (code, file["fits"], trainer["fits"]) == (0, True, None)
    assert {moment["name"] for moment in trainer["moments"]} == {"update", "publish"}
    assert trainer["bytes"] == max(moment["bytes"] for moment in trainer["moments"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--gpu", "x100"], "--gpu must be a size such as 80GiB or one of t4,"), (["--volume", "a"], "CLAIM=DIR")],
)
def test_plan_refuses_wrong_arguments(tmp_path, arguments, message):
    code, output = run("plan", write_job(tmp_path, SMOLLM2_135M), *arguments)
    assert code == 2
    assert message in output


def test_plan_needs_the_configuration_of_the_model(tmp_path):
    job = write_job(tmp_path, SMOLLM2_135M)
    (tmp_path / "model" / "config.json").unlink()
    code, output = run("plan", job)
    assert code == 2
    assert "spec.model.source" in output
    assert "config.json is missing" in output


def test_plan_refuses_a_model_that_cannot_be_trained(tmp_path):
    code, output = run("plan", write_job(tmp_path, {"architectures": ["PhiForCausalLM"], "model_type": "phi"}))
    assert code == 2
    assert "/model is PhiForCausalLM, which cannot be trained: its head adds a bias" in output


@pytest.mark.parametrize(("gpu", "chosen"), [("rtx-4090", "full"), ("h100-80gb", "selective")])
def test_plan_shows_what_is_computed_again(gpu, chosen, tmp_path):
    job = write_job(tmp_path, QWEN25_1B5, trainer={"gpusPerReplica": 1})
    line = next(line for line in run("plan", job, "--gpu", gpu)[1].splitlines() if "gradientCheckpointing" in line)
    assert line == f"trainer.gradientCheckpointing: auto is {chosen}"
    (file,) = json.loads(run("plan", job, "--gpu", gpu, "-o", "json")[1])["files"]
    assert file["recomputation"] == chosen
