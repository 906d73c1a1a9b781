"""The table of several models."""

import json

from rljob_api.run.comparisons import Comparison, Figure, ModelResult
from rljob_cli.evaluate.results import build_comparison_table, describe_notes, print_comparison
from rljob_cli.tables import to_text


def make_result(model, phase="Succeeded", figures=(), message=""):
    fields = {"phase": phase, "figures": list(figures), "message": message}
    return ModelResult(model=model, source="/m", job=f"j-{model}", run=f"runs/j-{model}", **fields)


FIRST = [
    Figure(set="math", name="accuracy", value=0.5, low=0.25, high=0.75, num_prompts=16),
    Figure(set="aime", name="avg@4", value=0.1, num_prompts=30, num_failed=2, num_left_out=1),
]
SECOND = [Figure(set="math", name="accuracy", value=None, num_prompts=12)]
COMPARISON = Comparison(
    job="sums", models=[make_result("a", figures=FIRST), make_result("b", figures=SECOND),
                        make_result("c", "Failed", message="head: no room")],
)  # fmt: skip


def test_a_row_is_an_estimator_of_a_set_and_a_column_a_model():
    rows = [line.split("  ") for line in to_text(build_comparison_table(COMPARISON)).splitlines()]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows] == [
        ["set", "figure", "prompts", "a", "b", "c"],
        ["math", "accuracy", "12 to 16", "0.500 [0.250, 0.750]", "-", "failed"],
        ["aime", "avg@4", "30", "0.100", "-", "failed"],
    ]


def test_notes_say_who_failed_and_which_episodes_are_not_counted():
    assert describe_notes(COMPARISON) == [
        "c: Failed: head: no room",
        "a: aime: 2 failed, counted as 0, 1 without a score, left out",
    ]


def test_json_is_one_object_with_the_file(capsys, tmp_path):
    print_comparison(COMPARISON, "json", tmp_path / "evaluation.json")
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("file") == str(tmp_path / "evaluation.json")
    assert Comparison.model_validate(printed) == COMPARISON


def test_table_without_any_result_has_its_header_alone():
    nothing = Comparison(job="sums", models=[make_result("a", "Failed")])
    assert to_text(build_comparison_table(nothing)).split() == ["set", "figure", "prompts", "a"]
