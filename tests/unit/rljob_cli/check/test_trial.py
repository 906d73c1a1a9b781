"""What `rljob validate` says about functions that it does not call, and about answers that get nothing."""

from dataclasses import replace

from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreResult
from rljob_cli.check.samples import SampleBuilder
from rljob_cli.check.trial import Trial, build_samples, describe_skipped, find_problems, find_unrewarded_answer
from rljob_inputs.prompts import Prompt
from tests.support.job_simulation import make_job


def test_functions_that_are_not_called_are_named_with_the_reason():
    function = {"module": "trl.rewards", "entrypoint": "accuracy_reward", "requirements": ["trl"]}
    rewards = [{"name": "trl", "function": function}, {"name": "own", "function": {"inline": "x"}}]
    [line] = describe_skipped(make_job(rewards=rewards))
    assert line == (
        "reward trl: not called, requirements are not installed by this check; `rljob test-reward` calls it"
    )


PROMPT = Prompt(0, "1 + 1 =", [], "2", "sums", {})


def find_warnings(*scores, prompt=PROMPT, **rewards):
    names = [f"r{number}" for number in range(len(scores))]
    job = make_job(rewards=[{"name": name, "function": {"inline": "x"}} | rewards.get(name, {}) for name in names])
    results = [ScoreResult(id="s", valid=True, score=score) for score in scores if score is not None]
    trials = [Trial(number, names[number], 1.0, result) for number, result in enumerate(results)]
    return [(found.path, found.is_warning) for found in find_unrewarded_answer(job, trials, prompt)]


def test_answer_of_the_data_that_gets_nothing_is_a_warning():
    assert find_warnings(0.0) == [("spec.rewards[0]", True)]
    assert find_warnings(0.0, -0.5) == [("spec.rewards", True)]


def test_answer_that_some_reward_pays_is_none():
    assert find_warnings(1.0) == []
    assert find_warnings(0.0, 0.5) == [], "of a penalty, 0 is the most"
    assert find_warnings(0.0, 0.5, r1={"weight": 0.0}) == [("spec.rewards", True)]


def test_answer_that_is_a_number_is_the_completion_as_text():
    """A function that compares it with the text of a completion scores every right answer 0."""
    number = replace(PROMPT, ground_truth=2)
    completions = [sample.completion for sample in build_samples(number, SampleBuilder(make_job()))]
    assert completions == ["2", "The answer is not hard to find.\n2"]
    assert find_warnings(0.0, prompt=number) == [("spec.rewards[0]", True)]
    for unknown in (True, ["2"], {"value": 2}):
        assert find_warnings(0.0, prompt=replace(PROMPT, ground_truth=unknown)) == []


def test_reward_that_returns_nothing_for_the_answer_is_a_warning():
    """As a function without `return` does: each sample would be without a score."""
    job = make_job(rewards=[{"name": name, "function": {"inline": "x"}} for name in ("a", "b")])
    none = ScoreResult(id="s", valid=False, reason=InvalidReason.ABSTAINED)
    some = ScoreResult(id="s", valid=True, score=1.0)

    def find(*results):
        trials = [Trial(number, "r", 1.0, result) for number, result in enumerate(results)]
        return [found.message for found in find_unrewarded_answer(job, trials, PROMPT)]

    [message] = find(none, none)
    assert message.startswith("returns None for the answer of the first row, '2': it abstains")
    assert find(none, some) == [], "the rewards are for different rows"
    assert find(none) == [], "the other reward was not called"


def test_nothing_is_said_about_what_is_not_known():
    assert find_warnings(0.0, None) == [], "the other reward was not called"
    assert find_warnings(0.0, prompt=replace(PROMPT, ground_truth=None)) == []
    assert find_warnings(0.0, r0={"scope": "group"}) == [], "equal answers may get 0 in their group"


def test_accuracy_of_a_set_must_be_a_component_of_its_own_rewards():
    rewards = [{"name": name, "function": {"inline": "x"}} for name in ("first", "second")]
    sets = [
        {"name": "a", "data": {"source": "x.jsonl"}, "rewards": ["first"], "accuracy": "exact"},
        {"name": "b", "data": {"source": "x.jsonl"}, "rewards": ["second"], "accuracy": "exact"},
    ]
    job = make_job(rewards=rewards, evaluation={"sets": sets})
    results = [ScoreResult(id="x", valid=True, score=1.0, components={name: 1.0}) for name in ("acc", "exact")]
    trials = [Trial(index, rewards[index]["name"], 0.0, result) for index, result in enumerate(results)]
    [finding] = find_problems(job, trials)
    assert finding.path == "spec.evaluation.sets[0].accuracy"
    assert finding.message == "must be a component that a reward returns, got exact; returned: acc, score"
