"""Figures of an evaluation, from the lines of metrics.jsonl."""

from rljob_api.run.comparisons import Comparison, ModelResult, list_figures, write_comparison
from rljob_api.run.folder import FILE_EVALUATION
from rljob_api.run.metrics import EvaluationRecord

SAMPLED = EvaluationRecord(
    step=0, time=1.0, set="aime", samples_per_prompt=4, num_prompts=10, num_samples=80, accuracy=0.25, accuracy_low=0.2,
    accuracy_high=0.3, pass_at={1: 0.25, 4: 0.5}, pass_at_low={1: 0.1, 4: 0.3}, pass_at_high={1: 0.4, 4: 0.7},
    majority=0.3, majority_low=0.1, majority_high=0.5, num_failed=3, num_left_out=2,
)  # fmt: skip
GREEDY = EvaluationRecord(step=0, time=1.0, num_prompts=8, num_samples=8)


def test_each_estimator_of_each_set_is_a_figure():
    figures = list_figures([GREEDY, SAMPLED])
    shown = [(f.set, f.name, f.value, f.low, f.high, f.num_prompts) for f in figures]
    assert shown == [
        ("eval", "accuracy", None, None, None, 8),
        ("aime", "avg@4", 0.25, 0.2, 0.3, 10),
        ("aime", "pass@1", 0.25, 0.1, 0.4, 10),
        ("aime", "pass@4", 0.5, 0.3, 0.7, 10),
        ("aime", "maj@4", 0.3, 0.1, 0.5, 10),
    ]
    assert (figures[1].num_failed, figures[1].num_left_out) == (3, 2)


def test_file_reads_back_as_the_same(tmp_path):
    model = ModelResult(
        model="m", source="/m", job="j", run="runs/j", phase="Succeeded", figures=list_figures([SAMPLED])
    )
    comparison = Comparison(job="sums", models=[model])
    path = write_comparison(tmp_path, comparison)
    assert path.name == FILE_EVALUATION
    assert Comparison.model_validate_json(path.read_text()) == comparison
