"""What `rljob validate` says about functions that it does not call, and about answers that get nothing."""

from dataclasses import replace

from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreResult
from rljob_cli.check.trial import Trial, describe_skipped, find_problems, find_unrewarded_answer, write_answers
from rljob_inputs.prompts import Prompt
from tests.support.job_simulation import make_job


def test_functions_that_are_not_called_are_named_with_the_reason():
    function = {"module": "trl.rewards", "entrypoint": "accuracy_reward", "requirements": ["trl"]}
    rewards = [{"name": "trl", "function": function}, {"name": "own", "function": {"inline": "x"}}]
    [line] = describe_skipped(make_job(rewards=rewards), [Trial(1, "own", 1.0)])
    assert line == (
        "reward trl: not called, requirements are not installed by this check; `rljob test-reward` calls it"
    )


PROMPT = Prompt(0, "1 + 1 =", [], "2", "sums", {})


def find_warnings(*scores, prompt=PROMPT, remedy="", **trial):
    """Return the warnings about rewards that give these scores to right and wrong answers. None: it was not called."""
    names = [f"r{number}" for number in range(len(scores))]
    job = make_job(rewards=[{"name": name, "function": {"inline": "x"}} for name in names])
    trials = [
        Trial(number, names[number], 1.0, RESULT, scores=given, remedy=remedy, **trial)
        for number, given in enumerate(scores)
        if given is not None
    ]
    assert all(found.is_warning for found in find_unrewarded_answer(job, trials, prompt))
    return [(found.path, found.message) for found in find_unrewarded_answer(job, trials, prompt)]


RESULT = ScoreResult(id="s", valid=True, score=0.0)
LONGER = ScoreResult(id="s", valid=True, score=0.5)


def test_reward_that_scores_right_and_wrong_answers_alike_is_a_warning():
    [(path, message)] = find_warnings((0.0, 0.0, 0.0))
    assert path == "spec.rewards[0].function"
    assert message.startswith(
        "scores the first row's answer, '2', in every usual form as no answer and a wrong one: it may"
    )
    assert len(find_warnings((0.0, 0.0), (-1.0, -1.0))) == 2
    [(_, message)] = find_warnings((0.0, 0.0), remedy="signature: verl0.2")
    assert message.endswith("right answers score otherwise with function.signature: verl0.2, so set that")
    assert len(find_warnings((0.0, 0.0), prompt=replace(PROMPT, ground_truth={"target": {"value": 2}}))) == 1


def test_reward_that_tells_them_apart_by_other_texts_is_a_warning_next_to_others():
    """The others may be right, or not called."""
    [(path, _)] = find_warnings((0.5, 0.0), (0.0, 0.0), remedy="signature: trl")
    assert path == "spec.rewards[1].function"
    [(path, _)] = find_warnings(None, (0.0, 0.0), remedy="signature: trl")
    assert path == "spec.rewards[1].function"


def test_reward_that_tells_them_apart_is_none():
    assert find_warnings((1.0, 0.0)) == []
    assert find_warnings((0.0, 0.0), (0.5, 0.0)) == [], "one of format next to one of the answer"
    assert find_warnings((0.0, 0.0), apart=(RESULT, RESULT), together=(RESULT, LONGER)) == [], "a rank or a length"


def test_answer_is_written_as_models_do():
    assert [*write_answers("7").values()] == [
        *(
            "7",
            "#### 7",
            "\\boxed{7}",
            "Answer: 7",
            "<answer>7</answer>",
            "<think>It is 7.</think>\n<answer>7</answer>",
        ),
        *("", "I do not know."),
    ]
    assert write_answers(7) == write_answers("7"), "a function that compares it with a text scores every right answer 0"
    nested = write_answers({"target": ["2,718"], "numbers": [1]})
    assert (nested["12"], nested["JSON"]) == ("2,718", '{"target": ["2,718"], "numbers": [1]}')
    for unknown in (True, None, [], {}, ""):
        assert write_answers(unknown) == {}


def test_form_that_scored_is_named():
    scored = Trial(0, "r", 1.0, LONGER, "#### 12", (0.0, 0.5))
    assert scored.describe() == "reward r: score 0.5 for `#### 12`, ready after 1.0 s"
    assert replace(scored, form="").describe() == "reward r: score 0.5, ready after 1.0 s"
    assert "for right, wrong and empty answers alike" in Trial(0, "r", 1.0, RESULT, scores=(0.0, 0.0)).describe()


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
    assert find_warnings((0.0, 0.0), None) == [], "the other reward was not called"
    assert find_warnings((0.0, 0.0), prompt=replace(PROMPT, ground_truth=None)) == []
    assert find_warnings(()) == [], "of a group, or with network: other forms were not tried"


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
