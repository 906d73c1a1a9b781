"""`rljob test-reward` with its real server."""

from __future__ import annotations

import json

import yaml
from typer.testing import CliRunner

from rljob_cli.check import try_reward
from rljob_cli.main import app
from tests.paths import EXAMPLES
from tests.support.model_folder import write_model


def rljob(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_scores_and_output_of_the_reward_are_printed(tmp_path):
    folder = tmp_path / "job"
    assert rljob("init", folder)[0] == 0
    reward = folder / "reward.py"
    reward.write_text(reward.read_text() + "\nprint('imported')\n")
    code, output = rljob("test-reward", folder / "rljob.yaml", "--file", folder / "data" / "completions.jsonl")
    assert code == 0, output
    assert "0.5" in output
    assert "imported" in output
    reward.write_text("def compute_score(data_source, solution_str, ground_truth): raise ValueError('no')\n")
    code, output = rljob("test-reward", folder / "rljob.yaml", "--completion", "5", "--answer", "5")
    assert code == 1
    assert "ValueError" in output


def test_results_as_json_are_all_that_stdout_has(tmp_path):
    job = tmp_path / "job" / "rljob.yaml"
    rljob("init", job.parent)
    (job.parent / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth):\n"
        "    print('called')\n"
        "    return {'score': 1 / float(solution_str), 'half': 0.5}\n"
    )
    done = CliRunner().invoke(
        app, ["test-reward", str(job), "--completion", "4", "--completion", "0", "--answer", "5", "-o", "json"]
    )
    found = json.loads(done.stdout)
    first, second = found["results"]
    assert (done.exit_code, found["reward"]) == (1, "correct")
    assert (first["completion"], first["score"], first["components"]) == ("4", 0.25, {"half": 0.5})
    assert (second["valid"], second["reason"]) == (False, "exception")
    assert "called" in found["printed"]


def test_all_rewards_are_scored_and_their_weighted_sum(tmp_path):
    job = tmp_path / "job" / "rljob.yaml"
    rljob("init", job.parent)
    data = yaml.safe_load(job.read_text())
    second = {"name": "is_short", "weight": -0.5, "function": {"inline": "def reward(completions): return [1.0]"}}
    job.write_text(yaml.safe_dump({**data, "spec": {**data["spec"], "rewards": [*data["spec"]["rewards"], second]}}))
    done = CliRunner().invoke(app, ["test-reward", str(job), "--completion", "5", "--answer", "5", "-o", "json"])
    found = json.loads(done.stdout)
    assert [each["reward"] for each in found["rewards"]] == ["correct", "is_short"]
    [correct], [short] = [[result["score"] for result in each["results"]] for each in found["rewards"]]
    assert (short, found["scores"]) == (1.0, [correct - 0.5])
    code, output = rljob("test-reward", job, "--completion", "5", "--answer", "5")
    assert code == 0
    assert "reward is_short" in output
    assert "weighted sum" in output
    assert "weighted sum" not in rljob("test-reward", job, "--completion", "5", "--reward", "is_short")[1]


def test_length_example_scores_groups_as_its_readme_shows():
    folder = EXAMPLES / "length"
    code, output = rljob("test-reward", folder / "rljob.yaml", "--file", folder / "completions.jsonl")
    assert code == 0, output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    scores = {row[0]: row[3] for row in rows if row[0]}
    assert scores == {"1.1": "1", "1.2": "0.5", "1.3": "0", "2.1": "1", "2.2": "0"}


def test_reward_that_reads_token_ids_gets_those_of_the_jobs_model(tmp_path):
    job = tmp_path / "job" / "rljob.yaml"
    rljob("init", job.parent)
    model = write_model(tmp_path / "model")
    (job.parent / "reward.py").write_text(
        "def reward(completions, completion_ids, **columns):\n    return [len(ids) for ids in completion_ids]\n"
    )
    arguments = ["--completion", "four", "--answer", "4", "-o", "json", "--set", f"spec.model.source={model}"]
    done = CliRunner().invoke(app, ["test-reward", str(job), *arguments])
    [result] = json.loads(done.stdout)["results"]
    assert (result["score"], result["reason"]) == (5.0, None), "a token per byte, and eos_token"


def test_import_that_hangs_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(try_reward, "LIMIT_SECONDS", 5.0)
    folder = tmp_path / "job"
    assert rljob("init", folder)[0] == 0
    reward = "def compute_score(data_source, solution_str, ground_truth): return 1\n"
    (folder / "reward.py").write_text(f"import threading\nthreading.Event().wait()\n{reward}")
    code, output = rljob("test-reward", folder / "rljob.yaml", "--completion", "5", "--answer", "5")
    assert code == 2, output
    assert "reward correct: its import did not end within 5 s" in output


def test_slow_import_is_reported_while_it_lasts(tmp_path):
    folder = tmp_path / "job"
    assert rljob("init", folder)[0] == 0
    (folder / "reward.py").write_text(
        "import time\ntime.sleep(4)\ndef compute_score(data_source, solution_str, ground_truth): return 1\n"
    )
    code, output = rljob("test-reward", folder / "rljob.yaml", "--completion", "5", "--answer", "5")
    assert code == 0, output
    assert "waits for the import of reward correct (" in output


def test_mechanism_that_the_jobs_env_names_is_disabled(tmp_path):
    folder = tmp_path / "job"
    assert rljob("init", folder)[0] == 0
    (folder / "reward.py").write_text(
        "import tempfile\n"
        "def compute_score(data_source, solution_str, ground_truth):\n"
        "    with tempfile.NamedTemporaryFile(dir='/var/tmp') as file:\n"
        "        return file.write(b'xxx')\n"
    )
    arguments = "test-reward", folder / "rljob.yaml", "--completion", "5", "--answer", "5"
    code, output = rljob(*arguments)
    assert code == 1, output
    assert "only to its scratch directory" in output
    job = yaml.safe_load((folder / "rljob.yaml").read_text())
    job["spec"]["rewards"][0]["env"] = {"RLJOB_REWARD_DISABLE_ISOLATION": "landlock"}
    (folder / "rljob.yaml").write_text(yaml.safe_dump(job))
    code, output = rljob(*arguments)
    assert code == 0, output
    assert "landlock: turned off" in output
