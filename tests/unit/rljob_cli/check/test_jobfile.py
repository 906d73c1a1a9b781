"""Reading a job file: overrides and paths."""

from __future__ import annotations

import json

import pytest

from rljob_api.errors import UserError
from rljob_api.read.documents import parse_path
from rljob_cli.check.jobfile import apply_override, load

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: j}
spec:
  model: {source: ./model}
  data:
    train: {source: train.jsonl}
  rewards:
  - name: r
    function: {file: reward.py}
  algorithm:
    optimizer: {maxGradNorm: null}
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def test_relative_paths_start_at_the_job_file(path):
    spec = load(path).job.spec
    assert spec.model.source == str(path.parent / "model")
    assert spec.data.train.source == str(path.parent / "train.jsonl")
    assert spec.rewards[0].function.file == str(path.parent / "reward.py")


@pytest.mark.parametrize(
    "written",
    [
        "Qwen/Qwen3-0.6B",
        "https://huggingface.co/Qwen/Qwen3-0.6B",
        "hf.co/Qwen/Qwen3-0.6B/tree/main",
        "hf:/Qwen/Qwen3-0.6B",
    ],
)
def test_name_and_address_on_the_hub_are_sources(path, written):
    found = load(path, [f"spec.model.source={written}", "spec.data.eval.source=openai/gsm8k"])
    assert (found.job.spec.model.source, found.job.spec.data.eval.source) == (
        "hf://Qwen/Qwen3-0.6B",
        "hf://openai/gsm8k",
    )
    assert found.named == {"spec.model.source": written, "spec.data.eval.source": "openai/gsm8k"}
    assert found.document.data["spec"]["model"]["source"] == "hf://Qwen/Qwen3-0.6B", "as `rljob submit` applies it"


def test_folder_of_that_name_next_to_the_job_file_wins(path):
    (path.parent / "Qwen").mkdir()
    assert load(path, ["spec.model.source=Qwen/Qwen3"]).job.spec.model.source == str(path.parent / "Qwen/Qwen3")
    assert load(path, ["spec.data.train.source=data/rows.jsonl"]).named == {}, "a file that is missing"


def test_home_is_that_of_this_machine(path, monkeypatch):
    monkeypatch.setenv("HOME", str(path.parent / "home"))
    for written in ("~/models/x", "$HOME/models/x", "${HOME}/models/x"):
        found = load(path, [f"spec.model.source={written}"])
        assert found.job.spec.model.source == str(path.parent / "home/models/x")
        assert "spec.model.source" in found.relative, "`rljob submit` takes it along"


def test_arguments_of_functions_keep_their_texts(path):
    found = load(path, ["spec.rewards[0].function.kwargs.source=org/name"])
    assert found.job.spec.rewards[0].function.kwargs == {"source": "org/name"}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("spec.lr", "verl's actor_rollout_ref.actor.optim.lr is spec.algorithm.optimizer.learningRate here"),
        ("spec.num_generations", "TRL's num_generations is spec.algorithm.groupSize here"),
        ("spec.epochs", "verl's trainer.total_epochs x rows / data.train_batch_size is spec.schedule.steps here"),
        ("spec.algorithm.total_epochs", "verl's trainer.total_epochs x rows / data.train_batch_size is spec.schedule"),
        ("spec.epsilon", "TRL's epsilon is spec.algorithm.loss.clipLow here"),
        ("spec.algorithm.epsilon", "TRL's epsilon is spec.algorithm.loss.clipLow here"),
        (
            "spec.evaluation.temperature",
            "verl's actor_rollout_ref.rollout.val_kwargs.temperature is spec.evaluation.sampling.temperature here",
        ),
        ("spec.temperature", "TRL's temperature is spec.rollout.sampling.temperature here"),
        ("spec.trainer.learningRate", "TRL's learning_rate is spec.algorithm.optimizer.learningRate here"),
        ("spec.algorithm.critic.lr", "verl's critic.optim.lr is spec.algorithm.critic.learningRate here"),
        (
            "spec.algorithm.warmup_ratio",
            "TRL's warmup_ratio (of earlier versions) x max_steps is spec.algorithm.optimizer.warmupSteps here",
        ),
        (
            "spec.per_device_train_batch_size",
            "TRL's per_device_train_batch_size (8) x steps_per_generation / num_generations (8) is spec.schedule.prom",
        ),
        ("spec.data.train.path", "TRL's train_dataset.path is spec.data.train.source here"),
        ("spec.model.name", "TRL's model.name is spec.model.source here"),
        ("spec.model.id", "did you mean source?"),
        ("spec.rewards[0].path", "did you mean"),
        ("spec.rollout.tensorParallelSize", "OpenRLHF's --vllm.tensor_parallel_size is spec.rollout.gpusPerReplica"),
        ("spec.num_iterations", "each sample trains once; raise `schedule.miniBatches`"),
        ("spec.schedule.step", "did you mean steps?"),
    ],
)
def test_names_of_other_trainers_are_answered_with_ours(path, field, message):
    with pytest.raises(UserError) as caught:
        load(path, [f"{field}=1"])
    assert f"{field} is unknown; {message}" in str(caught.value)


def test_relative_paths_of_an_agent_start_at_the_job_file(path):
    agent = {"type": "loop", "user": {"function": {"file": "user.py"}}}
    agent["tools"] = [{"name": "t", "function": {"file": "lib/tools.py"}}]
    found = load(path, [f"spec.agent={json.dumps(agent)}", "spec.data.format=chat"])
    assert found.job.spec.agent.user.function.file == str(path.parent / "user.py")
    assert found.job.spec.agent.tools[0].function.file == str(path.parent / "lib" / "tools.py")
    assert found.relative["spec.agent.user.function.file"] == "user.py"
    assert found.relative["spec.agent.tools[0].function.file"] == "lib/tools.py"


def test_relative_path_of_a_users_model_starts_at_the_job_file(path):
    agent = {"type": "loop", "user": {"model": {"model": {"source": "./user"}, "persona": "x"}}}
    found = load(path, [f"spec.agent={json.dumps(agent)}", "spec.data.format=chat"])
    assert found.job.spec.agent.user.model.model.source == str(path.parent / "user")
    assert found.relative["spec.agent.user.model.model.source"] == "./user"


def test_folder_of_a_command_starts_at_the_job_file(path):
    agent = {"type": "program", "runner": {"command": ["python", "agent.py"], "workingDir": "app"}}
    found = load(path, [f"spec.agent={json.dumps(agent)}", "spec.data.format=chat"])
    assert found.job.spec.agent.runner.working_dir == str(path.parent / "app")
    assert found.relative["spec.agent.runner.workingDir"] == "app"


@pytest.mark.parametrize("file", ["kit/rewards.py", "kit/rewards/__init__.py"])
def test_module_next_to_the_job_file_is_a_file_of_it(path, file):
    (path.parent / file).parent.mkdir(parents=True)
    (path.parent / file).touch()
    found = load(path, ["spec.rewards[0].function={module: kit.rewards}"])
    assert found.job.spec.rewards[0].function.file == str(path.parent / file)
    assert found.relative["spec.rewards[0].function.file"] == file
    assert found.document.data["spec"]["rewards"][0]["function"]["file"] == file, "which `rljob submit` reads"
    other = load(path, ["spec.rewards[0].function={module: trl.rewards}"])
    assert (other.job.spec.rewards[0].function.module, other.job.spec.rewards[0].function.file) == ("trl.rewards", None)


def test_module_next_to_a_file_is_refused(path):
    (path.parent / "kit.py").touch()
    with pytest.raises(UserError, match="exactly one of inline, file, configMapKeyRef, module"):
        load(path, ["spec.rewards[0].function={module: kit, file: other.py}"])


def test_override_is_yaml_and_creates_missing_fields(path):
    overrides = ["spec.schedule.steps=3", "spec.rewards[0].slots=2", "spec.algorithm.optimizer.learningRate=1e-6"]
    spec = load(path, overrides).job.spec
    assert (spec.schedule.steps, spec.rewards[0].slots, spec.algorithm.optimizer.learning_rate) == (3, 2, 1e-6)
    assert spec.algorithm.optimizer.max_grad_norm is None, "an explicit null stays one"


@pytest.mark.parametrize("override", ["spec.schedule.steps", "=3", "spec.rewards[7].slots=1", "spec.model.source.x=1"])
def test_override_without_a_target_is_a_user_error(path, override):
    with pytest.raises(UserError, match="--set"):
        load(path, [override])


def test_invalid_override_is_reported_like_an_error_in_the_file(path):
    with pytest.raises(UserError, match=r"job\.yaml:\d+: spec\.schedule\.steps must be at least 1, got 0"):
        load(path, ["spec.schedule.steps=0"])


def test_paths_are_parsed_as_messages_print_them():
    assert parse_path("spec.rewards[0].name") == ("spec", "rewards", 0, "name")
    data = {"a": [{"b": 1}]}
    apply_override(data, "a[0].b=[2, 3]")
    assert data == {"a": [{"b": [2, 3]}]}


def test_override_of_a_list_that_names_no_entry_says_how_to():
    with pytest.raises(UserError, match=r"--set a\.letters\.b=2: letters does not exist; .* are \[0\] to \[1\]"):
        apply_override({"a": [{}, {}]}, "a.letters.b=2")


MODELS = """\
---
apiVersion: rljob.dev/v1alpha1
kind: RewardModel
metadata: {name: judge}
spec:
  function: {file: judge.py}
  slots: 3
  env: {TOLERANCE: "1e-6"}
  timeoutSeconds: 7
"""


def refer(path, models=MODELS, name="judge"):
    reward = f"name: r\n    weight: 0.5\n    rewardModelRef: {{name: {name}}}"
    path.write_text(JOB.replace("name: r\n    function: {file: reward.py}", reward) + models)
    return path


def test_reward_model_of_the_file_becomes_the_jobs_own_reward(path):
    file = load(refer(path))
    reward = file.job.spec.rewards[0]
    assert (reward.name, reward.weight, reward.slots, reward.timeout_seconds) == ("r", 0.5, 3, 7)
    assert reward.reward_model_ref is None
    assert reward.function.file == str(path.parent / "judge.py")
    assert reward.env == {"TOLERANCE": "1e-6"}, "a text stays a text"


def test_problem_of_a_reward_model_has_its_own_line(path):
    file = load(refer(path))
    text = path.read_text().splitlines()
    problem = file.problem("spec.rewards[0].function.file", "is missing")
    assert (problem.path, text[problem.line - 1]) == ("spec.function.file", "  function: {file: judge.py}")
    assert "weight: 0.5" in text[file.problem("spec.rewards[0].weight", "is odd").line - 1]


def test_reference_is_kept_on_request(path):
    file = load(refer(path), keep_references=True)
    assert file.job.spec.rewards[0].reward_model_ref.name == "judge"
    assert list(file.reward_models) == ["judge"]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (
            "",
            r"yaml:11: spec\.rewards\[0\]\.rewardModelRef\.name must be a RewardModel in this file, got judge; add",
        ),
        (MODELS.replace("name: judge", "name: jury"), r"in this file, got judge \(it has jury\)"),
        (
            MODELS.replace("name: judge", "name: judge, namespace: team"),
            r"in the job's namespace default, got one in team",
        ),
        (MODELS.replace("slots: 3", "replicas: 0"), r"job\.yaml:20: spec\.replicas must be at least 1"),
        (MODELS.replace("slots: 3", "slots: 0"), r"job\.yaml:20: spec\.slots must be at least 1, got 0"),
        (MODELS + MODELS, r"metadata\.name is the name of two RewardModels"),
        ("---\n" + JOB, r"must contain exactly one RLJob, got 2"),
    ],
)
def test_invalid_reference_is_reported_with_its_line(path, models, message):
    with pytest.raises(UserError, match=message):
        load(refer(path, models))


def test_invalid_reward_model_and_override_are_reported_together(path):
    with pytest.raises(UserError) as error:
        load(refer(path, MODELS.replace("slots: 3", "slots: 0")), ["spec.schedule.steps=0"])
    assert "spec.schedule.steps must be at least 1" in str(error.value)
    assert "spec.slots must be at least 1" in str(error.value)


def test_a_path_without_a_job_is_answered_with_the_nearest_name(path):
    with pytest.raises(
        UserError, match=r"job\.yml: not found; did you mean job\.yaml\?; pass the path of a job's YAML"
    ):
        load(path.with_suffix(".yml"))
