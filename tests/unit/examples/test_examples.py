"""Every example is a valid job whose data and rewards match it, and no held-out sum is trained on."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.manifest.job_sections import DataSource
from rljob_api.read.load import load_job
from tests.paths import EXAMPLES
from tests.support.environments import GivenAnswers, build_episode, play
from tests.support.loading import find_problems
from tests.support.modules import load_module

FOLDERS = sorted(file.parent for file in EXAMPLES.glob("*/rljob.yaml"))


def rows(folder: Path, source: DataSource) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / source.source).read_text().splitlines()]


def score(example: str, completion: str, truth: str, truncated: bool = False) -> dict[str, float]:
    module = load_module(EXAMPLES / example / "reward.py")
    return module.compute_score("", completion, truth, extra_info={"truncated": truncated})  # type: ignore[no-any-return]


def test_all_examples_exist() -> None:
    assert [folder.name for folder in FOLDERS] == [
        "calculator",
        "chat",
        "code-sandbox",
        "distill",
        "environment",
        "feedback",
        "gsm8k",
        "guess",
        "judge",
        "length",
        "mixture",
        "program",
        "quickstart",
        "retrieval",
        "self-play",
        "service",
        "shared",
        "shared-reward",
        "tiny",
    ]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_example_is_a_valid_job_whose_files_match(folder: Path) -> None:
    spec = load_job(folder / "rljob.yaml").spec
    assert spec.data.eval is not None or spec.service
    for source in (spec.data.train, spec.data.eval) if spec.data.eval else ():
        first = rows(folder, source)[0]
        assert {source.prompt, source.answer} <= set(first)
        assert set(re.findall(r"{(\w+)}", spec.data.template)) <= {*first, "prompt"}
    for reward in spec.rewards:
        if reward.served_model:
            assert (folder / reward.served_model.source).resolve().parent == EXAMPLES.parent / ".models"
            continue
        assert reward.function is not None
        assert reward.function.file is not None
        file = folder / reward.function.file
        if reward.function.requirements:
            ast.parse(file.read_text())
            continue
        spec = reward.function.model_dump(include={"entrypoint", "signature", "kwargs", "columns", "factory_args"})
        assert find_problems(file.read_text(), str(file), scope=reward.scope, **spec) == []
    assert (folder / "README.md").read_text().count(f"rljob run examples/{folder.name}/rljob.yaml") == 1


def test_model_user_variant_differs_from_the_feedback_example_by_user_and_length() -> None:
    base, variant = (load_job(EXAMPLES / "feedback" / name).spec for name in ("rljob.yaml", "model-user.yaml"))
    user = variant.agent.user
    assert user is not None
    assert user.model is not None
    assert user.model.stop is not None
    assert user.model.stop in user.model.persona
    same = variant.model_copy(
        update={
            "agent": variant.agent.model_copy(update={"user": base.agent.user}),
            "rollout": variant.rollout.model_copy(update={"max_model_len": base.rollout.max_model_len}),
        }
    )
    assert same == base


def test_environment_with_its_own_rows_differs_by_its_data_and_holds_sums_out() -> None:
    base, variant = (load_job(EXAMPLES / "environment" / name).spec for name in ("rljob.yaml", "rows.yaml"))
    assert list(variant.env_sources) == ["spec.data.train", "spec.data.eval"]
    given = {"given_train": base.data.train, "eval": base.data.eval}
    assert variant.model_copy(update={"given_data": variant.data.model_copy(update=given)}) == base
    make = load_module(EXAMPLES / "environment" / "environment.py").rows
    sums = {}
    for split, source in (("train", variant.data.train), ("eval", variant.data.eval)):
        assert source is not None
        made, again = (list(islice(make(split), source.limit)) for _ in range(2))
        assert made == again, "a restarted job reads the same rows"
        sums[split] = {tuple(sorted(re.findall(r"\d+", row["question"]))) for row in made}
    assert not sums["train"] & sums["eval"], "no held-out sum, nor its mirror, is trained on"


def test_warm_start_of_the_quickstart_adds_given_rows_and_halves_the_steps_of_rl() -> None:
    base, variant = (load_job(EXAMPLES / "quickstart" / name).spec for name in ("rljob.yaml", "warm-start.yaml"))
    given = variant.data.warm_start
    assert given is not None
    assert variant.schedule.steps - variant.schedule.num_warm_steps == base.schedule.steps / 2
    assert (
        variant.schedule.num_warm_steps * variant.schedule.prompts_per_step
        <= 100
        == len(rows(EXAMPLES / "quickstart", given))
    )
    data = variant.data.model_copy(update={"warm_start": None})
    schedule = variant.schedule.model_copy(update={"warm_start": None, "steps": base.schedule.steps})
    evaluation = variant.evaluation.model_copy(update={"every_steps": base.evaluation.every_steps})
    assert variant.model_copy(update={"given_data": data, "schedule": schedule, "evaluation": evaluation}) == base


def test_shared_example_differs_from_the_tiny_one_by_its_placement_alone() -> None:
    tiny, shared = (load_job(EXAMPLES / name / "rljob.yaml").spec for name in ("tiny", "shared"))
    assert shared.shares_trainer
    assert (shared.trainer.num_ranks, shared.num_rollout_replicas) == (1, 1)
    rollout = shared.rollout.model_copy(update={"placement": "separate"})
    trainer = shared.trainer.model_copy(update={"replicas": tiny.trainer.replicas})
    assert shared.model_copy(update={"rollout": rollout, "trainer": trainer, "rewards": tiny.rewards}) == tiny


def test_shared_example_with_a_reward_model_has_one_reward_more() -> None:
    shared, more = (load_job(EXAMPLES / name / "rljob.yaml").spec for name in ("shared", "shared-reward"))
    assert list(more.models_in_trainer) == ["spec.rewards[1].model"]
    assert more.model_copy(update={"rewards": more.rewards[:1]}) == shared


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_models_of_an_example_are_created_by_prepare(folder: Path) -> None:
    prepare = load_module(EXAMPLES / "prepare.py")
    created = {prepare.MODELS / name for name, _ in prepare.MODELS_OF_EXAMPLE[folder.name]}
    spec = load_job(folder / "rljob.yaml").spec
    sources = {spec.model.source, *(model.source for model in spec.served_models.values())}
    assert {(folder / source).resolve() for source in sources if "://" not in source} == created


def test_no_held_out_sum_or_its_mirror_is_trained_on() -> None:
    folder = EXAMPLES / "quickstart"
    data = load_job(folder / "rljob.yaml").spec.data
    assert data.eval is not None
    train, held_out = ({(row["a"], row["b"]) for row in rows(folder, source)} for source in (data.train, data.eval))
    assert len(held_out) == 128
    assert not train & held_out
    assert not train & {(b, a) for a, b in held_out}


def test_sums_in_git_equal_the_output_of_their_script() -> None:
    make_sums = load_module(EXAMPLES / "make_sums.py")
    for name, pairs in zip(("train", "eval"), make_sums.split_pairs(), strict=True):
        text = (EXAMPLES / "quickstart" / "data" / f"{name}.jsonl").read_text()
        assert text == "".join(map(make_sums.build_row, pairs))
        if name == "train":
            given = (EXAMPLES / "quickstart" / "data" / "given.jsonl").read_text()
            assert given == "".join(map(make_sums.build_given_row, pairs[:100]))
        assert all(row["answer"] == str(row["a"] + row["b"]) for row in map(json.loads, text.splitlines()))


@pytest.mark.parametrize(
    ("completion", "truncated", "expected"),
    [
        (" 31", False, 1.2),
        ("31", True, 0.2),
        (" 30", False, 0.3),
        ("17 + 14 = 31.", False, 0.2),
        ("no idea", False, 0.0),
    ],
)
def test_quickstart_reward_prefers_a_bare_answer_that_ends(completion: str, truncated: bool, expected: float) -> None:
    assert score("quickstart", completion, "31", truncated)["score"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("completion", "truncated", "expected"),
    [("The answer is 31.", False, 1.25), ("31", True, 1.0), ("30", False, 0.25), ("", True, 0.0)],
)
def test_chat_reward_scores_the_last_number_and_the_end(completion: str, truncated: bool, expected: float) -> None:
    assert score("chat", completion, "31", truncated)["score"] == pytest.approx(expected)


def test_gsm8k_reward_accepts_every_reference_solution() -> None:
    module = load_module(EXAMPLES / "gsm8k" / "reward.py")
    for row in map(json.loads, (EXAMPLES / "gsm8k" / "data" / "test.jsonl").read_text().splitlines()):
        assert module.compute_score("", row["answer"], row["answer"])["score"] == 1.0, row["answer"]
        assert module.compute_score("", "#### 123456789", row["answer"])["score"] == 0.0
    assert score("gsm8k", "so 18", "#### 18")["score"] == 0.0
    assert score("gsm8k", "#### 1,018", "work\n#### 1018")["score"] == 1.0


def test_length_penalty_is_relative_to_the_groups_right_answers() -> None:
    penalty = load_module(EXAMPLES / "length" / "reward.py").LengthPenalty(penalty=0.5)

    def scores(*completions: tuple[str, int]) -> list[float]:
        group = []
        for text, num_tokens in completions:
            own = penalty.compute_score("", text, "31", {"num_tokens": num_tokens})
            group.append({"score": own.pop("score"), "components": {name: float(own[name]) for name in own}})
        return [result["score"] for result in penalty.post_process_scores(group)]

    assert scores(("31", 2), ("so 31", 6), ("thus 31", 10), ("3", 1)) == [1.0, 0.75, 0.5, 0.0]
    assert scores(("so 31", 9), ("12", 1)) == [1.0, 0.0], "no right answer is shorter"
    assert scores(("12", 1), ("no idea", 9)) == [0.0, 0.0]


def test_products_in_git_equal_the_output_of_their_script_and_do_not_overlap() -> None:
    make_products = load_module(EXAMPLES / "make_products.py")
    splits = make_products.split_pairs()
    for name, pairs in zip(("train", "eval"), splits, strict=True):
        text = (EXAMPLES / "calculator" / "data" / f"{name}.jsonl").read_text()
        assert text == "".join(map(make_products.build_row, pairs))
        assert all(row["answer"] == str(row["a"] * row["b"]) for row in map(json.loads, text.splitlines()))
    train, held_out = ({frozenset(pair) for pair in pairs} for pairs in splits)
    assert not train & held_out


@pytest.mark.parametrize("example", ["feedback", "guess"])
def test_single_turn_variant_differs_from_its_example_by_its_agent_alone(example: str) -> None:
    loop, single = (
        load_job(EXAMPLES / example / name).spec.model_dump() for name in ("rljob.yaml", "single-turn.yaml")
    )
    assert {name for name in loop if loop[name] != single[name]} == {"agent"}
    assert (loop["agent"]["type"], single["agent"]["type"]) == ("loop", "singleTurn")


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("17 + 14 = 31.", None, 0.0),
        ("40", "40 is too high. Try again.", -0.05),
        ("17 + 14 = 30", "30 is too low. Try again.", -0.05),
        ("no idea", "That is not a number. Reply with the number only.", -0.1),
    ],
)
def test_user_of_the_feedback_example_compares_the_last_number(answer: str, text: str | None, reward: float) -> None:
    state = {"tries": 1}
    messages = [{"role": "user", "content": "What is 17 + 14?"}, {"role": "assistant", "content": answer}]
    result = load_module(EXAMPLES / "feedback" / "user.py").respond(messages, state, answer="31")
    assert result[:2] == (text, reward)
    assert state == {"tries": 2}


def test_feedback_reward_scores_the_last_answer_and_shows_the_first() -> None:
    compute_score = load_module(EXAMPLES / "feedback" / "reward.py").compute_score
    turns = [{"text": "30", "reward": -0.1, "tool_calls": []}, {"text": "31", "reward": 0.0, "tool_calls": []}]
    conversation = compute_score("", "31", "31", {"truncated": False, "turns": turns})
    assert conversation == {"score": 1.5, "last": True, "first": False, "turns": 2}
    assert compute_score("", "no", "31", {"truncated": True}) == {
        "score": 0.0,
        "last": False,
        "first": False,
        "turns": 1,
    }


def test_numbers_in_git_equal_the_output_of_their_script_and_ranges_do_not_overlap() -> None:
    make_numbers = load_module(EXAMPLES / "make_numbers.py")
    splits = make_numbers.make_questions()
    for name, questions in zip(("train", "eval"), splits, strict=True):
        text = (EXAMPLES / "guess" / "data" / f"{name}.jsonl").read_text()
        assert text == "".join(map(make_numbers.build_row, questions))
        assert len(set(questions)) == len(questions)
        assert all(0 <= hidden - low < make_numbers.WIDTH for low, hidden in questions)
    train, held_out = ({low for low, _ in questions} for questions in splits)
    assert not train & held_out
    asked = {number for low in train | held_out for number in range(low, low + make_numbers.WIDTH)}
    assert not asked & set(range(make_numbers.SHOWN_LOW, make_numbers.SHOWN_LOW + make_numbers.WIDTH))
    places = Counter(hidden - low for low, hidden in splits[1])
    assert set(places.values()) == {len(held_out)}, "one fixed answer to each question is right in 1 of 7"


def play_guess(answers: list[str], cost: float, cost_at_end: float) -> tuple[list[str], list[float], dict[str, Any]]:
    """Return the user's messages, the rewards of the turns and the scored end of a conversation about the number 24."""
    respond = load_module(EXAMPLES / "guess" / "user.py").respond
    state: dict[str, Any] = {}
    messages = [{"role": "user", "content": "A number from 21 to 27?"}]
    replies, rewards = [], []
    for answer in answers:
        messages.append({"role": "assistant", "content": answer})
        text, reward, _ = respond(messages, state, answer="24", low=21, cost=cost)
        rewards.append(reward)
        if text is None:
            break
        replies.append(text)
        messages.append({"role": "user", "content": text})
    compute_score = load_module(EXAMPLES / "guess" / "reward.py").compute_score
    extra_info = {"state": state, "turns": [{"text": answer} for answer in answers], "truncated": False}
    return replies, rewards, compute_score("", answers[-1], "24", extra_info, cost=cost_at_end)


def test_user_of_the_guess_example_says_where_the_number_is() -> None:
    replies, rewards, scored = play_guess(["It is 21.", "no idea", "28"], 0.1, 0.0)
    assert replies == ["Higher.", "A number!", "Lower."]
    assert rewards == pytest.approx([-0.1, -0.3, -0.3]), "28 is outside the range"
    assert scored == {"score": 1.0, "found": False, "turns": 3}


def test_total_at_the_end_of_the_guess_example_is_that_of_its_turns() -> None:
    totals = []
    for cost, cost_at_end in ((0.1, 0.0), (0.0, 0.1)):
        _, rewards, scored = play_guess(["27", "22", "24"], cost, cost_at_end)
        assert scored["found"]
        totals.append(sum(rewards) + scored["score"])
    assert totals == pytest.approx([1.8, 1.8])


@pytest.mark.parametrize(("error", "text", "expected"), [("", "3053", 1.6), ("", "12", 0.6), ("no", "3053", 1.1)])
def test_calculator_reward_counts_calls_that_worked(error: str, text: str, expected: float) -> None:
    call = {"name": "multiply", "arguments": {"a": 43, "b": 71}, "error": error}
    turns = [{"text": "", "tool_calls": [call]}, {"text": text, "tool_calls": []}]
    module = load_module(EXAMPLES / "calculator" / "reward.py")
    assert module.compute_score("", text, "3053", {"turns": turns})["score"] == pytest.approx(expected)
    assert load_module(EXAMPLES / "calculator" / "tools.py").multiply(43, 71) == 3053


def test_code_of_the_shown_calls_computes_the_answers_and_questions_differ() -> None:
    make_code_questions = load_module(EXAMPLES / "make_code_questions.py")
    shown, *splits = make_code_questions.make_questions()
    for name, questions in zip(("train", "eval"), splits, strict=True):
        text = (EXAMPLES / "code-sandbox" / "data" / f"{name}.jsonl").read_text()
        assert text == "".join(make_code_questions.build_row(shown, each) for each in questions)
    assert all(str(eval(each.code)) == each.answer for each in (*shown, *splits[0], *splits[1]))
    texts = [{each.text for each in questions} for questions in (shown, *splits)]
    assert [len(each) for each in texts] == [3, 128, 64]
    assert len(set.union(*texts)) == 195


@pytest.mark.parametrize(
    ("result", "answer", "truncated", "expected"),
    [
        ("7952", "7952", False, 1.6),
        ("7952", "It is 7953.", False, 0.6),
        ("7953", "7952", True, 1.0),
        ("", "no", True, 0),
    ],
)
def test_code_sandbox_reward_counts_code_that_computes_the_answer(
    result: str, answer: str, truncated: bool, expected: float
) -> None:
    compute_score = load_module(EXAMPLES / "code-sandbox" / "reward.py").compute_score
    turns = [{"text": "", "tool_calls": [{"name": "run_python"}]}, {"text": answer, "tool_calls": []}]
    messages = [{"role": "user", "content": "?"}, {"role": "tool", "content": result}]
    scored = compute_score("", answer, "7952", {"turns": turns, "messages": messages, "truncated": truncated})
    assert scored["score"] == pytest.approx(expected)
    assert scored["called"]
    assert not compute_score("", answer, "7952", {"turns": turns[1:], "messages": messages[:1]})["called"]


class FakeOpenAI:
    """Answers in order, as OpenAI's client does; an answer with ... at its end was cut off."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.seen = iter(enumerate(answers)), []  # type: ignore[var-annotated]
        self.chat = SimpleNamespace(completions=self)

    def create(self, *, model: str, messages: list[dict[str, str]]) -> SimpleNamespace:
        self.seen.append((model, messages[-1]["content"]))
        number, text = next(self.answers)
        end = "length" if text.endswith("...") else "stop"
        choice = SimpleNamespace(message=SimpleNamespace(content=text), finish_reason=end)
        return SimpleNamespace(id=f"chatcmpl-{number}", choices=[choice])


@pytest.mark.parametrize(
    ("answers", "reward", "info", "costs"),
    [
        (["31"], 1.0, {"right": True, "first": True, "answers": 1}, []),
        (["17 + 14 = 31 because...", "31"], 1.0, {"right": True, "first": False, "answers": 2}, ["chatcmpl-0"]),
        (["30", "no", "32"], 0.0, {"right": False, "first": False, "answers": 3}, [f"chatcmpl-{n}" for n in range(3)]),
    ],
)
def test_program_rewards_a_right_answer_and_charges_wrong_ones(
    answers: list[str], reward: float, info: dict[str, object], costs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeOpenAI(*answers)
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=lambda: client))
    prompt = [{"role": "user", "content": "What is 17 + 14?"}]
    result = load_module(EXAMPLES / "program" / "agent.py").run(prompt, "31")
    assert result == {"reward": reward, "rewards": dict.fromkeys(costs, -0.05), "info": info}
    assert len(prompt) == 1
    assert {model for model, _ in client.seen} == {"policy"}
    if answers[0] == "30":
        assert [text for _, text in client.seen[1:]] == [
            "30 is too low. Try again.",
            "That is not a number. Reply with the number only.",
        ]


def test_accuracy_of_the_program_is_a_number_that_it_returns() -> None:
    accuracy = load_job(EXAMPLES / "program" / "rljob.yaml").spec.evaluation.accuracy
    assert f'"{accuracy}":' in (EXAMPLES / "program" / "agent.py").read_text()


@pytest.mark.parametrize(
    ("answers", "rewards", "right"),
    [(["31"], [1.0], 1.0), (["17 + 14 = 30", "It is 31."], [-0.05, 1.0], 1.0), (["30", "no", "32"], [-0.05] * 3, 0.0)],
)
def test_environment_rewards_a_right_number_and_charges_wrong_ones(
    answers: list[str], rewards: list[float], right: float
) -> None:
    job = load_job(EXAMPLES / "environment" / "rljob.yaml").spec
    module = load_module(EXAMPLES / "environment" / "environment.py")
    model, prompt = GivenAnswers(*answers), [{"role": "user", "content": "What is 17 + 14?"}]
    assert job.agent.environment is not None
    episode = build_episode("31", job.agent.turn_limit)._replace(prompt=prompt)
    reply = play(job.agent.environment.framework, module.Sums, model, episode, job.agent.environment.args)
    assert list(reply.rewards.values()) == rewards
    assert reply.info[job.evaluation.accuracy] == right, "the number that is the accuracy"
    if answers[0] == "30":
        assert [seen[-1]["content"] for seen in model.conversations[1:]] == [
            "30 is too low. Try again.",
            "That is not a number. Reply with the number only.",
        ]


def test_tiny_reward_has_a_signal() -> None:
    reward = load_module(EXAMPLES / "tiny" / "reward.py").reward
    assert reward(completions=["eeee", "abc", ""], answer=["1", "2", "3"]) == [1.0, 0.0, 0.0]
