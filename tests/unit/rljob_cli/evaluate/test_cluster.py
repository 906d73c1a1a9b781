"""The results of jobs in a cluster, from their statuses."""

import pytest

from rljob_api.manifest.evaluation import Evaluation, list_held_out
from rljob_api.manifest.job_sections import Data
from rljob_api.run.comparisons import Comparison
from rljob_cli.evaluate.cluster import read_result
from rljob_cli.evaluate.models import Candidate
from rljob_cli.evaluate.results import describe_notes

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
