"""The command line: exit codes and messages, without a process."""

from __future__ import annotations

import base64
import json

import pytest
import yaml
from typer.testing import CliRunner

from rljob_api.run.summaries import format_summary
from rljob_cli.main import app, find_obstacle
from tests.support.model_folder import write_model
from tests.support.records import run_summary

_NAMES = [command.name or command.callback.__name__ for command in app.registered_commands]


def rljob(*arguments, stdin=""):
    done = CliRunner().invoke(app, list(map(str, arguments)), input=stdin)
    return done.exit_code, done.output


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A valid job in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth): return 1.0\n")
    path = tmp_path / "job.yaml"
    path.write_text(
        """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: sleepy}
spec:
  model: {source: ./model}
  rollout: {sampling: {maxTokens: 8}}
  data: {train: {source: train.jsonl}}
  rewards: [{name: r, function: {file: reward.py}}]
"""
    )
    return path


def test_run_with_a_missing_data_file_prints_line_and_field(job):
    job.write_text(job.read_text().replace("train.jsonl", "none.jsonl"))
    code, output = rljob("run", job, "--dir", job.parent / "runs")
    assert code == 2
    assert output.startswith(f"{job}:7: spec.data.train.source file {job.parent}/none.jsonl not found")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["init", "taken"], "taken: File exists; fix the file, or pass another path"),
        (["init", "n" * 300], "File name too long"),
        (["validate", "."], ".: not a file; pass the path of a job's YAML file"),
        (["validate", "none.yaml"], "none.yaml: not found; did you mean job.yaml?; pass the path of a job's YAML file"),
        (["validate", "job.yaml", "--volume", "claim"], "--volume must be CLAIM=DIR, got claim"),
        (["run", "job.yaml", "--dir", "taken"], "taken: File exists"),
        (["test-reward", "job.yaml", "--file", "latin-1"], "latin-1:1: is not UTF-8 text"),
        (["test-reward", "job.yaml", "--completion", "x", "--reward", "z"], "that the job serves, got z; it serves r"),
    ],
)
def test_invalid_argument_is_one_line_and_exit_code_2(job, arguments, message):
    (job.parent / "taken").touch()
    (job.parent / "latin-1").write_bytes(b"\xff\n")
    code, output = rljob(*arguments)
    assert (code, output.count("\n")) == (2, 1), output
    assert message in output


def test_text_that_is_not_utf8_is_an_invalid_value(job):
    """The shell passes any bytes, which Python decodes to halves of characters."""
    for command, option in (
        ("test-reward", "--completion"),
        ("test-reward", "--answer"),
        ("test-agent", "--completion"),
    ):
        code, output = rljob(command, job, option, "\udcff")
        assert code == 2
        assert f"Invalid value for '{option}': is not UTF-8 text" in output


def test_init_writes_a_valid_job_once(tmp_path):
    folder = tmp_path / "My first job"
    assert rljob("init", folder)[0] == 0
    code, output = rljob("validate", folder / "rljob.yaml", "--no-call")
    assert code == 0, output
    code, output = rljob("init", folder)
    assert code == 2
    assert "already has rljob.yaml" in output


def test_errors_are_printed_before_warnings(job):
    job.write_text(
        job.read_text().replace("rewards:", "wrong: 1\n  rewards:").replace("{name: r,", "{name: r, weight: -1,")
    )
    done = CliRunner().invoke(app, ["validate", str(job), "--no-call"])
    first, *others = done.stderr.splitlines()
    assert "spec.wrong is unknown" in first
    assert any(line.startswith("warning:") and "weight" in line for line in others)


def test_render_prints_objects_with_a_placeholder_token(job):
    code, output = rljob("validate", "--render", job)
    assert code == 0
    assert base64.b64encode(b"RENDERED-WITHOUT-A-TOKEN").decode() in output
    assert "kind: StatefulSet" in output


def test_list_is_read_as_kubectl_prints_it(job):
    """`kubectl get rljob,configmap -o yaml`: objects with a status, and of other kinds."""
    found = yaml.safe_load(job.read_text())
    found["metadata"] |= {"uid": "u1", "resourceVersion": "7", "managedFields": [{"manager": "kubectl"}]}
    found["status"] = {"phase": "Running", "observedGeneration": 1}
    other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"k": "v"}}
    listed = {"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": [other, found]}
    job.write_text(yaml.safe_dump(listed))
    code, output = rljob("validate", "--render", job)
    assert (code, "kind: StatefulSet" in output) == (0, True), output
    code, output = rljob("validate", job, "--no-call")
    assert code == 0, output
    found["spec"]["trainer"] = {"replica": 2}
    job.write_text(yaml.safe_dump(listed))
    code, output = rljob("validate", job, "--no-call")
    line = job.read_text().splitlines().index("      replica: 2") + 1
    assert f":{line}: spec.trainer.replica is unknown; did you mean replicas?" in output


def test_render_warns_of_paths_that_no_cluster_has(job):
    done = CliRunner().invoke(app, ["validate", "--render", str(job)])
    assert done.exit_code == 0
    assert done.stderr.count("is a path on this machine, which no cluster has") == 3
    assert "warning" not in done.stdout


def test_render_reports_a_refused_pod_with_its_line(job):
    job.write_text(job.read_text() + "  trainer: {env: {A=B: x}}\n")
    code, output = rljob("validate", "--render", job)
    assert code == 2
    assert f"{job}:9: spec.trainer.env.A=B must be an environment variable's name" in output


def test_render_quotes_what_kubectl_would_not_read_as_text(job):
    job.write_text(job.read_text() + "  trainer: {env: {FLAG: 'y', NUMBER: '1e3'}}\n")
    output = rljob("validate", "--render", job)[1]
    assert "value: 'y'" in output
    assert "value: '1e3'" in output


def test_version_names_all_parts():
    code, output = rljob("--version")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()][:3] == ["rljob", "rljob-api", "rljob-core"]


def test_command_without_arguments_prints_the_help():
    assert rljob()[1] == rljob("-h")[1]


@pytest.mark.parametrize("command", [[], *([name] for name in _NAMES)], ids=["rljob", *_NAMES])
def test_every_command_has_short_help(command):
    code, output = rljob(*command, "-h")
    assert code == 0
    assert output == rljob(*command, "--help")[1]


@pytest.mark.parametrize("name", sorted({*_NAMES} - {"logs"}))
def test_every_command_prints_invalid_arguments_as_one_object_with_output_json(name):
    code, output = rljob(name, "--no-such-option", "-o", "json")
    assert code == 2
    error = json.loads(output)
    assert error.pop("error").startswith("No such option: --no-such-option")
    assert error == {"exit_code": 2}


@pytest.mark.parametrize("option", [["-o", "json"], ["-ojson"], ["--output", "json"], ["--output=json"]])
def test_error_is_an_object_with_its_problems_in_each_form_of_the_option(job, option):
    job.write_text(job.read_text() + "  shedule: {}\n")
    code, output = rljob("validate", "--render", job, *option)
    error = json.loads(output)
    assert (code, error["exit_code"], error["file"]) == (2, 2, str(job))
    assert [(problem["line"], problem["path"]) for problem in error["problems"]] == [(9, "spec.shedule")]


def test_unknown_output_is_refused_with_the_choices(job):
    code, output = rljob("run", job, "-o", "xml")
    assert code == 2
    assert "'xml' is not one of 'live', 'plain', 'json'" in output


def test_without_a_kubeconfig_nothing_asks_for_a_cluster(job, monkeypatch):
    monkeypatch.setenv("HOME", str(job.parent))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    code, output = rljob("top")
    assert (code, "there is no kubeconfig" in output) == (2, True)
    code, output = rljob("logs", "sleeepy")
    assert (code, "no run at sleeepy; `rljob ls` lists runs; no kubeconfig" in output) == (2, True)


def test_validate_checks_arguments_and_filenames_and_stdin(job):
    code, output = rljob("validate", job, "-f", "job.yaml", "-f", "-", "--no-call", stdin=job.read_text())
    valid = [line for line in output.splitlines() if not line.startswith(" ")]
    assert (code, valid) == (0, [f"{name}: RLJob sleepy is valid" for name in (job, "job.yaml", "-")])


def test_validate_reports_each_file_as_json_and_exits_with_2_if_one_is_invalid(job):
    code, output = rljob("validate", job, "none.yaml", "--no-call", "-o", "json")
    result = json.loads(output)
    assert (code, result["valid"], [file["valid"] for file in result["files"]]) == (2, False, [True, False])
    assert result["files"][0]["relative_paths"]["spec.model.source"] == "./model"
    assert result["files"][0]["prompt_lengths"][0]["max"] > 1
    assert "not found" in result["files"][1]["problems"][0]["message"]


def test_warnings_come_first_and_the_last_line_has_their_number(job):
    job.write_text(job.read_text().replace("{name: r,", "{name: r, weight: -1,"))
    first, *_, last = rljob("validate", job, "--no-call")[1].splitlines()
    assert first.startswith(f"warning: {job}:8: spec.rewards[0].weight")
    assert last == f"{job}: RLJob sleepy is valid, with 1 warning"


def test_validate_says_where_a_job_can_run(job):
    job.write_text(job.read_text().replace("  rollout: {", "  rollout: {gpusPerReplica: 1, "))
    code, output = rljob("validate", job, "--no-call")
    assert code == 0
    assert "is valid\n" in output
    assert "not on this machine, only on a cluster:\n    " in output
    assert "requests 1 GPUs, this machine has 0" in output
    assert f"`rljob submit {job}` takes ./model, train.jsonl, reward.py along" in output
    assert rljob("validate", job, "--no-call", "--local")[0] == 2
    code, output = rljob("validate", job, "--no-call", "--cluster")
    assert (code, output.count("is a path on this machine, which no cluster has")) == (2, 3)
    assert rljob("validate", job, "--local", "--cluster")[0] == 2


def test_reward_model_may_be_in_the_cluster_alone(job):
    text = job.read_text().replace("function: {file: reward.py}", "rewardModelRef: {name: math}")
    job.write_text(text.replace("./model", "hf://org/m").replace("train.jsonl", "hf://org/d"))
    assert rljob("validate", job, "--cluster")[0] == 0
    code, output = rljob("validate", job, "--no-call")
    assert code == 0
    assert "only on a cluster:\n    " in output
    assert "spec.rewards[0].rewardModelRef.name must be a RewardModel in this file, got math" in output
    assert rljob("validate", job, "--local", "--no-call")[0] == 2


def test_objects_of_other_kinds_are_accepted_and_named(job):
    others = "---\napiVersion: v1\nkind: Secret\nmetadata: {name: keys}\n---\napiVersion: v1\nkind: ConfigMap\n"
    job.write_text(job.read_text() + others + "metadata: {name: functions}\ndata: {}\n")
    code, output = rljob("validate", job, "--no-call")
    assert code == 0
    assert "ignores Secret keys (line 10), ConfigMap functions (line 14); kubectl applies them" in output


def test_render_prints_the_objects_of_all_files_as_one_json_list(job):
    def render(*arguments):
        return json.loads(CliRunner().invoke(app, ["validate", "--render", *map(str, arguments), "-o", "json"]).stdout)[
            "items"
        ]

    items, twice = render(job), render("-f", job, "-f", job)
    assert "StatefulSet" in {item["kind"] for item in items}
    assert twice == items * 2


@pytest.mark.parametrize("command", ["run", "validate", "test-reward"])
def test_command_without_a_file_names_all_ways_to_pass_one(command):
    code, output = rljob(command)
    assert code == 2
    assert "pass a job's file: JOB.yaml, -f JOB.yaml, or - for stdin" in output


def test_run_computes_in_float32_on_cpus_without_bfloat16(job, monkeypatch):
    dtypes = []

    def run_job(job, *_):
        dtypes.append(job.spec.trainer.dtype)
        return "Failed"

    monkeypatch.setattr("rljob_cli.commands.has_bfloat16", lambda: len(dtypes) > 0)
    monkeypatch.setattr("rljob_cli.run.command.run_job", run_job)
    outputs = [rljob("run", job, "--dir", job.parent / "runs", "--fresh")[1] for _ in range(2)]
    assert dtypes == ["float32", "bfloat16"]
    assert ["spec.trainer.dtype: float32, since these CPUs" in output for output in outputs] == [True, False]


def test_run_takes_one_file(job):
    code, output = rljob("run", job, job)
    assert code == 2
    assert "takes one job's file, got 2" in output


def test_init_prints_its_files_as_json(tmp_path):
    result = json.loads(rljob("init", tmp_path / "first", "-o", "json")[1])
    assert {file.name for file in (tmp_path / "first").iterdir() if file.is_file()} < {*result["files"]}


def finish_run(job, **changes):
    """Write what a finished run of 3 steps leaves."""
    folder = job.parent / "runs" / "sleepy"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(format_summary(run_summary(steps=3, **changes)))
    return folder / "summary.json"


def test_run_that_has_finished_says_so_and_starts_nothing(job):
    summary = finish_run(job)
    done = CliRunner().invoke(app, ["run", str(job), "--set", "spec.schedule.steps=3"])
    assert (done.exit_code, done.stdout) == (0, f"{summary}\n")
    remedy = "to train longer, raise spec.schedule.steps; to start over, pass --fresh"
    assert done.stderr == f"{summary.parent} has finished all 3 steps; {remedy}\n"


def test_run_that_has_finished_prints_its_summary_as_json(job):
    finish_run(job)
    done = CliRunner().invoke(app, ["run", str(job), "--set", "spec.schedule.steps=3", "-o", "json"])
    result = json.loads(done.stdout)
    assert (result["type"], result["phase"], result["summary"]["steps"]) == ("result", "Succeeded", 3)


@pytest.mark.parametrize(
    ("changes", "steps"), [({"phase": "Interrupted"}, 3), ({"phase": "Failed"}, 3), ({}, 4)], ids=str
)
def test_run_that_has_not_finished_is_checked_again(job, changes, steps):
    finish_run(job, **changes)
    code, output = rljob("run", job, "--set", f"spec.schedule.steps={steps}", "--set", "spec.model.source=./none")
    assert code == 2
    assert "spec.model.source" in output


@pytest.mark.parametrize("arguments", [["top"], ["explain", "sums"], ["suspend", "sums"], ["logs", "sums"]])
def test_cluster_that_cannot_be_reached_is_exit_code_1(tmp_path, arguments):
    done = CliRunner().invoke(app, [*arguments, "--kubeconfig", str(tmp_path / "none")])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no cluster: " in done.stderr
    assert "pass --kubeconfig or --context" in done.stderr


def test_cluster_that_cannot_be_reached_is_an_object_with_output_json(tmp_path):
    done = CliRunner().invoke(app, ["top", "-o", "json", "--kubeconfig", str(tmp_path / "none")])
    error = json.loads(done.stdout)
    assert (done.exit_code, error["exit_code"], done.stderr) == (1, 1, "")
    assert error["error"].startswith("no cluster: ")


def test_help_lists_every_command_in_a_group_once():
    _, output = rljob("-h")
    assert "Other commands" not in output, "a new command belongs to a group of cli/rljob_cli/app.py"
    shown = [line.split()[0] for line in output.partition("Job files:")[2].splitlines() if line.startswith("  ")]
    assert sorted(shown) == sorted(name.replace("_", "-") for name in _NAMES)


def test_systems_that_rljob_does_not_run_on_are_named_at_the_start():
    assert find_obstacle("linux", (3, 13, 2)) == find_obstacle("darwin", (3, 11, 0)) == ""
    assert "install it in WSL2" in find_obstacle("win32", (3, 12, 0))
    assert "uv tool install --python 3.13 rljob" in find_obstacle("linux", (3, 14, 0))
