from __future__ import annotations

import json

import pytest

from rljob_api.functions.conventions import Convention
from rljob_service.worker.load.loading import load
from rljob_service.worker.main import Executor
from rljob_service.worker.settings import FunctionSettings
from tests.support.loading import find_problems
from tests.support.plugins import KNOWN, REFERENCES


def check(source: str, scope: str = "sample", **settings: object) -> list[str]:
    return find_problems(source, scope=scope, **settings)


def call(source: str, **columns: object) -> str:
    """Return why a sample with these columns is invalid; empty if it is valid."""
    settings = FunctionSettings(source, "reward.py", None, "auto", {}, 2 << 30, signatures=REFERENCES)
    sample = {"id": "1", "prompt": "p", "completion": "c", "ground_truth": "c", "extra_info": columns}
    [outcome] = Executor(load(settings), settings).execute(json.dumps(sample).encode())
    return outcome.message


@pytest.mark.parametrize(
    "source",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...",
        "async def compute_score(solution_str, ground_truth): ...",
        "def reward(prompts, completions, **columns): ...",
        "def reward_func(completions, answer, **kwargs): ...",
        "try:\n    import no_such_module\nexcept ImportError:\n    def compute_score(solution_str): ...",
    ],
)
def test_check_accepts_functions_of_all_conventions(source: str) -> None:
    assert check(source) == []


@pytest.mark.parametrize("convention", KNOWN.conventions, ids=lambda convention: "|".join(convention.markers))
def test_convention_is_detected_from_its_arguments(convention: Convention) -> None:
    markers = [marker for marker in convention.markers if ":" in marker]
    plain = [name for name in convention.arguments if f"{name}: str" not in markers]
    parameters = [*plain, *markers, *filter(None, [convention.kwargs_parameter])]
    assert check(f"def reward({', '.join(parameters)}): ...", "group" if convention.lists else "sample") == []


def test_function_with_markers_of_two_conventions_is_refused() -> None:
    [problem] = check("def reward(solution_str, completions): ...")
    assert "requires completions, which the verl convention does not pass" in problem


def test_check_reports_a_missing_entry_point_with_defined_names() -> None:
    (problem,) = check("def score(solution_str): ...\ndef helper(): ...")
    assert problem.startswith("reward.py:1: none of compute_score, reward_func, reward, ")
    assert problem.endswith("was found (it defines score, helper); set function.entrypoint")


def test_only_public_function_is_the_entry_point() -> None:
    assert check("def grade(solution_str): ...\ndef _helper(): ...\nclass Cache: ...") == []
    (problem,) = check("def main(): ...")
    assert problem.startswith("reward.py:1: main() ")


def test_check_suggests_the_nearest_function_for_a_misspelled_entry_point() -> None:
    (problem,) = check("def my_reward(solution_str): ...", entrypoint="my_rewrad")
    assert problem.endswith("did you mean my_reward?")


def test_check_names_what_would_adapt_an_unknown_signature() -> None:
    (problem,) = check("\ndef compute_score(text, *, gold, **rest): ...")
    assert problem.startswith("reward.py:2: compute_score(text, gold, **rest) does not match a convention")
    assert "function.columns: {PARAMETER: completion, OTHER: ground_truth}, or write a function of response" in problem


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        (
            "def compute_score(data_source, solution_st, ground_truth): ...",
            "rename solution_st to solution_str if that",
        ),
        ("def reward(prompts, compeltions, **kwargs): ...", "rename compeltions to completions if that"),
        ("def reward(prompt, respnse, ground_truth): ...", "rename respnse to response if that"),
    ],
)
def test_check_corrects_a_misspelt_parameter(source: str, remedy: str) -> None:
    (problem,) = check(source)
    assert f"does not match a convention of reward functions; {remedy}" in problem


def test_check_leaves_other_words_and_plurals_to_the_adapter() -> None:
    for source in ("def f(text, truth): ...", "def f(responses, ground_truths): ..."):
        (problem,) = check(source)
        assert "rename" not in problem


def test_check_compares_an_explicit_signature_with_the_parameters() -> None:
    source = "def compute_score(data_source, solution_str, ground_truth): ..."
    assert check(source, signature="verl") == []
    (problem,) = check(source, signature="trl")
    assert "does not match signature: trl" in problem
    assert check("def reward(**everything): ...", signature="trl") == []


def test_required_parameter_that_is_no_column_makes_the_sample_invalid() -> None:
    source = "def compute_score(solution_str, ground_truth, tolerance, *, unit): return 1.0"
    problem = call(source, units="m", level=2)
    assert "requires tolerance, unit" in problem
    assert "the columns are units, level; add a default, a value in function.kwargs, or function.columns" in problem
    assert "{tolerance: extra_info.COLUMN, unit: extra_info.units}" in problem
    assert call(source, tolerance=0.1, unit="m") == "", "columns reach the parameters with their names"
    assert call("def compute_score(solution_str, ground_truht): return 1.0", level=2).endswith(
        "; rename ground_truht to ground_truth, or set function.columns: {ground_truht: extra_info.COLUMN}"
    )


def test_check_rejects_classes_and_positional_only_parameters() -> None:
    assert "is a class without __call__" in check("class reward: ...")[0]
    assert "positional-only" in check("def compute_score(solution_str, /): ...")[0]


def test_check_reports_kwargs_that_the_function_does_not_accept() -> None:
    source = "def compute_score(solution_str, ground_truth): ..."
    (problem,) = check(source, kwargs={"tolerance": 0.1})
    assert "does not accept tolerance" in problem
    assert check("def compute_score(solution_str, **rest): ...", kwargs={"tolerance": 0.1}) == []


CLASS = """
class Penalty:
    def compute_score(self, data_source, solution_str, ground_truth, extra_info=None): ...
    def post_process_scores(self, group): ...
"""


@pytest.mark.parametrize(
    "source",
    [
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos): ...",
        "def reward(prompts, completions, **columns): ...",
        "def reward_func(queries, prompts, labels): ...",
    ],
)
def test_functions_of_lists_score_groups_and_samples(source: str) -> None:
    assert check(source, "group") == []
    assert check(source) == [], "a sample is a group of one"


def test_check_rejects_a_function_of_one_sample_with_scope_group() -> None:
    source = "def compute_score(data_source, solution_str, ground_truth): ..."
    for signature in ("auto", "verl"):
        (problem,) = check(source, "group", signature=signature)
        assert "takes one sample, but scope: group passes lists" in problem
        assert problem.endswith("or write a function of lists that calls it for each sample")


def test_explicit_verl_signature_means_lists_with_scope_group() -> None:
    assert check("def compute_score(**everything): ...", "group", signature="verl") == []


@pytest.mark.parametrize("source", [CLASS, f"class Helper: ...\n{CLASS}"])
def test_check_accepts_a_class_with_both_methods(source: str) -> None:
    assert check(source, "sampleThenGroup") == []


@pytest.mark.parametrize("entrypoint", ["Penalty", "Inherited"])
def test_check_accepts_a_named_class_and_inherited_methods(entrypoint: str) -> None:
    source = f"{CLASS}\nclass Inherited(Penalty): ..."
    assert check(source, "sampleThenGroup", entrypoint=entrypoint) == []


@pytest.mark.parametrize(
    ("source", "entrypoint", "message"),
    [
        ("class A: ...", None, "no class with compute_score and post_process_scores was found (it defines A)"),
        ("def compute_score(solution_str): ...", None, "it defines no class"),
        ("def compute_score(solution_str): ...", "compute_score", "compute_score is a function"),
        ("class A:\n    def compute_score(self): ...", "A", "the class A has no post_process_scores"),
        (CLASS, "Penality", "did you mean Penalty?"),
    ],
)
def test_check_reports_an_invalid_class(source: str, entrypoint: str | None, message: str) -> None:
    (problem,) = check(source, "sampleThenGroup", entrypoint=entrypoint)
    assert message in problem


def test_check_names_the_scope_that_a_class_requires() -> None:
    (problem,) = check(CLASS, entrypoint="Penalty")
    assert "set scope: sampleThenGroup" in problem
