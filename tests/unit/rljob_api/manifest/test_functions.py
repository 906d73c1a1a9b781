"""A reward function's source is judged without being run."""

from __future__ import annotations

import pytest

from rljob_api.manifest.functions import SIGNATURE_VARIANTS, SignatureVariant, check_function, detect_signature_variant
from rljob_api.manifest.reward import FunctionReward, Scope


def check(source: str, scope: Scope = "sample", **settings: object) -> list[str]:
    function = FunctionReward.model_validate({"inline": source or "#", **settings})
    return check_function(source, "reward.py", function, scope)


@pytest.mark.parametrize(
    "source",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...",
        "async def compute_score(solution_str, ground_truth): ...",
        "def reward(prompts, completions, **columns): ...",
        "def reward_func(completions, answer, **kwargs): ...",
        "import ray\n@ray.remote\ndef reward_func(queries, prompts, labels): ...",
        "from grader import compute_score",
        "from grader import *",
        "compute_score = make_grader()",
        "try:\n    import regex\nexcept ImportError:\n    def compute_score(solution_str): ...",
    ],
)
def test_functions_of_the_three_conventions_pass_unchanged(source: str) -> None:
    assert check(source) == []


@pytest.mark.parametrize("variant", SIGNATURE_VARIANTS, ids=lambda variant: variant.marker)
def test_each_form_is_told_from_its_own_arguments(variant: SignatureVariant) -> None:
    assert detect_signature_variant(variant.arguments) == variant


def test_parameters_of_two_conventions_fit_none() -> None:
    assert detect_signature_variant(["solution_str", "completions"]) is None
    assert detect_signature_variant(["x"]) is None


def test_a_syntax_error_is_reported_with_its_line() -> None:
    assert check("import re\ndef compute_score(:\n    pass") == [
        "reward.py:2: the reward function has a syntax error: invalid syntax"
    ]


def test_a_null_byte_is_a_problem_and_no_crash() -> None:
    assert len(check("x = 1\0")) == 1


def test_a_missing_entry_point_is_reported_with_what_is_there() -> None:
    (problem,) = check("def score(solution_str): ...\ndef helper(): ...")
    assert problem == (
        "reward.py:1: none of compute_score, reward_func, reward is there (it defines score, helper); "
        "name yours in function.entrypoint"
    )


def test_a_misspelled_entry_point_suggests_the_nearest_function() -> None:
    (problem,) = check("def my_reward(solution_str): ...", entrypoint="my_rewrad")
    assert problem.endswith("did you mean my_reward?")


def test_a_wrong_signature_shows_what_was_found_and_what_is_expected() -> None:
    (problem,) = check("\ndef compute_score(text, *, gold, **rest): ...")
    assert problem.startswith("reward.py:2: compute_score(text, gold, **rest) fits no convention")
    for expected in ("verl (data_source, solution_str", "TRL (prompts, completions", "OpenRLHF (queries, prompts"):
        assert expected in problem


def test_an_explicit_signature_is_compared_with_the_parameters() -> None:
    source = "def compute_score(data_source, solution_str, ground_truth): ..."
    assert check(source, signature="verl") == []
    (problem,) = check(source, signature="trl")
    assert "not of the signature trl" in problem
    assert check("def reward(**everything): ...", signature="trl") == []


def test_a_required_parameter_that_nobody_passes_is_a_problem() -> None:
    source = "def compute_score(solution_str, ground_truth, tolerance, *, unit): ..."
    (problem,) = check(source)
    assert "requires tolerance, unit" in problem
    assert check(source, kwargs={"tolerance": 0.1, "unit": "m"}) == []


def test_a_class_or_positional_only_parameters_are_no_entry_point() -> None:
    assert "is a class" in check("class reward: ...")[0]
    assert "positional-only" in check("def compute_score(solution_str, /): ...")[0]


def test_the_last_definition_counts_as_in_python() -> None:
    assert check("def compute_score(x): ...\ndef compute_score(solution_str): ...") == []


def test_the_source_is_never_executed(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("print('run')\nraise SystemExit\ndef compute_score(solution_str): ...") == []
    assert capsys.readouterr().out == ""


def test_a_keyword_argument_that_the_function_does_not_take_is_a_problem() -> None:
    source = "def compute_score(solution_str, ground_truth): ..."
    (problem,) = check(source, kwargs={"tolerance": 0.1})
    assert "does not take tolerance" in problem
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
def test_functions_that_take_lists_score_groups(source: str) -> None:
    assert check(source, "group") == []
    assert check(source) == [], "a sample is a group of one"


def test_a_function_of_one_sample_scores_no_groups_and_is_told_what_to_write() -> None:
    source = "def compute_score(data_source, solution_str, ground_truth): ..."
    for signature in ("auto", "verl"):
        (problem,) = check(source, "group", signature=signature)
        assert "takes one sample, but scope: group passes lists" in problem
        assert "verl (data_sources, solution_strs" in problem


def test_verls_signature_means_the_lists_where_groups_are_scored() -> None:
    assert check("def compute_score(**everything): ...", "group", signature="verl") == []
    (problem,) = check("def compute_score(solution_strs, tool): ...", "group", signature="verl")
    assert "requires tool" in problem


@pytest.mark.parametrize("source", [CLASS, f"class Helper: ...\n{CLASS}", "from grader import *"])
def test_a_class_with_both_methods_scores_samples_and_then_their_group(source: str) -> None:
    assert check(source, "sampleThenGroup") == []


@pytest.mark.parametrize("entrypoint", ["Penalty", "Inherited", "Made"])
def test_a_class_may_be_named_and_what_it_inherits_is_not_known(entrypoint: str) -> None:
    source = f"{CLASS}\nclass Inherited(Penalty): ...\nMade = make()"
    assert check(source, "sampleThenGroup", entrypoint=entrypoint) == []


@pytest.mark.parametrize(
    ("source", "entrypoint", "words"),
    [
        ("class A: ...", None, "no class with compute_score and post_process_scores is there (it defines A)"),
        ("def compute_score(solution_str): ...", None, "it defines no class"),
        ("def compute_score(solution_str): ...", "compute_score", "compute_score is a function"),
        ("class A:\n    def compute_score(self): ...", "A", "the class A has no post_process_scores"),
        (CLASS, "Penality", "did you mean Penalty?"),
    ],
)
def test_what_is_no_such_class_is_told(source: str, entrypoint: str | None, words: str) -> None:
    (problem,) = check(source, "sampleThenGroup", entrypoint=entrypoint)
    assert words in problem


def test_a_class_without_its_scope_is_told_of_it() -> None:
    (problem,) = check(CLASS, entrypoint="Penalty")
    assert "save with scope: sampleThenGroup" in problem
