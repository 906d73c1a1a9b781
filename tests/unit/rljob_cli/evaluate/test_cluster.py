"""The results of jobs in a cluster, from their statuses."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from rljob_api.manifest.evaluation import Evaluation, list_held_out
from rljob_api.manifest.job_sections import Data
from rljob_api.run.comparisons import Comparison
from rljob_cli.evaluate.cluster import read_result
from rljob_cli.evaluate.models import Candidate
from rljob_cli.evaluate.results import describe_notes
from rljob_cli.main import app

DATA = {"source": "hf://org/data"}
SETS = list_held_out(
    Evaluation.model_validate({"sets": [{"name": "aime", "data": DATA, "samplesPerPrompt": 4}]}),
    Data.model_validate({"train": DATA, "eval": DATA}),
    [],
)
FIGURES = [("eval", "accuracy"), ("aime", "avg@4"), ("aime", "pass@1"), ("aime", "pass@2"), ("aime", "pass@4")]


@pytest.mark.parametrize(
    ("num_figures", "notes"),
    [
        (5, []),
        (3, ["m: Succeeded: not in its status: aime pass@2, aime pass@4; the metrics.jsonl of its run has all"]),
    ],
)
def test_figures_for_which_a_status_has_no_room_are_named(num_figures, notes):
    figures = [{"set": name, "name": figure, "value": 0.5} for name, figure in FIGURES[:num_figures]]
    job = {
        "metadata": {"name": "sums-eval-m"},
        "spec": {"model": {"source": "hf://org/m"}},
        "status": {"phase": "Succeeded", "evaluation": figures},
    }
    result = read_result(Candidate("m", "hf://org/m"), job, SETS)
    assert len(result.figures) == num_figures
    assert describe_notes(Comparison(job="sums", models=[result])) == notes


JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: sums}
spec:
  model: {source: pvc://models/base}
  data: {train: {source: pvc://data/train.jsonl}, eval: {source: pvc://data/eval.jsonl}}
  rewards: [{name: correct, function: {inline: "def compute_score(solution_str): return 1.0"}}]
"""


def dry_run(job, *arguments):
    models = [argument for path in ("a", "b") for argument in ("--model", f"pvc://models/{path}")]
    return CliRunner().invoke(app, ["evaluate", str(job), *models, "--submit", "--dry-run", *arguments])


def test_objects_of_a_dry_run_are_on_stdout_in_the_format_that_was_chosen(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    objects = json.loads(dry_run(job, "-o", "json").stdout)
    assert [item["spec"]["model"]["source"] for item in objects["items"]] == ["pvc://models/a", "pvc://models/b"]
    assert list(yaml.safe_load_all(dry_run(job).stdout)) == objects["items"]


def test_error_of_a_job_to_submit_is_json_on_stdout(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(JOB.replace("pvc://data/eval.jsonl", "./missing.jsonl"))
    for option in (["--dry-run"], []):
        done = CliRunner().invoke(
            app, ["evaluate", str(job), "--model", "pvc://m/a", "--submit", *option, "-o", "json"]
        )
        assert done.exit_code == 2
        assert json.loads(done.stdout)["problems"][0]["path"] == "spec.data.eval.source"
