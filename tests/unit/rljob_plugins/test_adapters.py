"""Functions of other projects run unchanged, and every form of return value is read correctly."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from rljob_api.errors import UserError
from rljob_api.wire.base import InvalidReason
from rljob_plugins.openrlhf.returns import read_rewards
from rljob_service.worker.forms import outcome
from rljob_service.worker.forms.outcome import Outcome
from rljob_service.worker.load.loading import load
from rljob_service.worker.main import Executor
from rljob_service.worker.settings import FunctionSettings
from tests.paths import ROOT
from tests.support.plugins import REFERENCES

REWARDS = ROOT / "tests" / "data" / "rewards"
VERL = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return "
TRL = "def reward(prompts, completions, **columns):\n    return "
OPENRLHF = "def reward_func(queries, prompts, labels):\n    return "

RENDERED = {"prompt": "2+2?", "query": "2+2?4<end>"}


def run(source: str, kwargs: dict[str, Any] | None = None, **request: Any) -> Outcome:
    settings = FunctionSettings(source, "function.py", None, "auto", kwargs or {}, 2048, signatures=REFERENCES)
    body = {"id": "1", "prompt": "2+2?", "completion": "4", "ground_truth": "4", "rendered": RENDERED, **request}
    (outcome,) = Executor(load(settings), settings).execute(json.dumps(body).encode())
    return outcome


@pytest.mark.parametrize(
    ("returned", "score", "components"),
    [
        ("0.5", 0.5, {}),
        ("True", 1.0, {}),
        ("3", 3.0, {}),
        ("(0.5, 'why')", 0.5, {}),
        ("{'score': 1, 'acc': True, 'length': 7, 'bad': float('nan')}", 1.0, {"acc": 1.0, "length": 7.0}),
        ("__import__('numpy').float32(0.5)", 0.5, {}),
        ("__import__('numpy').array([0.5])[0]", 0.5, {}),
    ],
)
def test_each_verl_return_form_is_read(returned: str, score: float, components: dict[str, float]) -> None:
    assert run(VERL + returned) == Outcome(score, components)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (VERL + "None", "abstained"),
        (VERL + "{'score': None}", "abstained"),
        (VERL + "float('nan')", "not_finite"),
        (VERL + "{'score': float('-inf')}", "not_finite"),
        (VERL + "10**400", "not_finite"),
        (VERL + "'0.5'", "bad_return"),
        (VERL + "{'reward': 1.0}", "bad_return"),
        (VERL + "()", "bad_return"),
        (VERL + "object()", "bad_return"),
        (VERL + "__import__('numpy').ma.masked", "not_finite"),
        (VERL + "1/0", "exception"),
        (TRL + "[None]", "abstained"),
        (TRL + "[float('nan')]", "not_finite"),
        (TRL + "[]", "bad_return"),
        (TRL + "[1.0, 2.0]", "bad_return"),
        (TRL + "1.0", "bad_return"),
        (TRL + "'1'", "bad_return"),
        (TRL + "__import__('numpy').ma.array([1.0], mask=[True])", "not_finite"),
        (TRL + "columns['missing']", "exception"),
        (OPENRLHF + "None", "abstained"),
        (OPENRLHF + "{'scores': [1.0]}", "bad_return"),
        (OPENRLHF + "[1.0, 2.0]", "bad_return"),
        (OPENRLHF + "[float('inf')]", "not_finite"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*masked element")
def test_anything_except_a_finite_number_becomes_a_reason(source: str, reason: str) -> None:
    result = run(source)
    assert (result.score, result.reason) == (None, reason)
    assert result.message


def test_reasons_equal_those_of_the_protocol() -> None:
    for reason in (outcome.EXCEPTION, outcome.NOT_FINITE, outcome.BAD_RETURN, outcome.ABSTAINED):
        assert InvalidReason(reason)


def test_verl_function_gets_its_four_arguments() -> None:
    added = {"num_turns": 2, "rollout_reward_scores": {}, "turn_scores": [], "tool_rewards": []}
    expected = ("d", "4", 5, {"k": 1, **added})
    source = f"{VERL}float((data_source, solution_str, ground_truth, extra_info) == {expected})"
    assert run(source, ground_truth=5, data_source="d", extra_info={"k": 1}).score == 1.0


def test_function_may_omit_arguments_and_take_kwargs() -> None:
    assert run("def compute_score(solution_str, factor): return factor", kwargs={"factor": 7}).score == 7.0


def test_async_function_is_awaited_in_one_loop() -> None:
    source = """
import asyncio
loops = set()
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    loops.add(asyncio.get_running_loop())
    return len(loops)
"""
    settings = FunctionSettings(source, "function.py", None, "auto", {}, 2048, signatures=REFERENCES)
    executor = Executor(load(settings), settings)
    body = json.dumps({"prompt": "p", "completion": "c"}).encode()
    assert [executor.execute(body)[0].score for _ in range(2)] == [1.0, 1.0]


def test_trl_function_gets_strings_for_strings_and_messages_for_a_chat() -> None:
    source = TRL + "[float(completions == [completions[0]] and isinstance(completions[0], str))]"
    assert run(source).score == 1.0
    source = (
        TRL + "[float(completions == [[{'role': 'assistant', 'content': '4'}]] and prompts[0][0]['role'] == 'user')]"
    )
    assert run(source, prompt=[{"role": "user", "content": "2+2?"}]).score == 1.0


def test_trl_columns_are_lists_from_the_answer_and_extra_info() -> None:
    source = (
        TRL + "[float([columns[n] for n in ('answer', 'ground_truth', 'solution', 'level')] == [['4']] * 3 + [[2]])]"
    )
    assert run(source, extra_info={"level": 2}).score == 1.0
    assert run("def reward(completions, level): return [level[0]]", extra_info={"level": 2, "other": 1}).score == 2.0


@pytest.mark.parametrize(
    "source",
    [
        "def reward(completions, level): return level",
        "def reward(response, label, level=None): return level",
        "def reward(response, label, *, level): return level",
        "def compute_score(solution_str, level): return level",
        "def reward_func(queries, level): return level",
        "from functools import partial\ndef f(completions, level): return level\nreward = partial(f)",
    ],
)
def test_column_reaches_the_parameter_that_bears_its_name_in_every_form(source: str) -> None:
    settings = FunctionSettings(
        source, "function.py", "grade" if "grade" in source else None, "auto", {}, 2048, signatures=REFERENCES
    )
    body = {"prompt": "2+2?", "completion": "4", "rendered": RENDERED, "extra_info": {"level": 2.5, "num_tokens": 1}}
    [outcome] = Executor(load(settings), settings).execute(json.dumps(body).encode())
    assert outcome.score == 2.5, outcome


def test_answer_column_reaches_the_parameter_that_bears_its_name() -> None:
    assert run("def reward(completions, final): return [float(final == ['4'])]", answer_column="final").score == 1.0
    assert run("def compute_score(solution_str, final): return float(final == '4')", answer_column="final").score == 1.0


def test_column_replaces_no_argument_of_a_form_without_columns() -> None:
    row = {"extra_info": {"ground_truth": "5", "solution_str": "5", "other": 1}}
    assert run(f"{VERL}float((solution_str, ground_truth) == ('4', '4'))", **row).score == 1.0
    source = "def compute_score(solution_str, **rest): return float('other' not in rest)"
    assert run(source, **row).score == 1.0, "verl passes no columns"


def test_missing_column_is_an_exception_that_names_it() -> None:
    for source in ("def reward(completions, levle): return [1.0]", "def reward(response, label, levle): return 1.0"):
        result = run(source, extra_info={"level": 1})
        assert result.reason == "exception"
        assert "requires levle, which the" in result.message
        assert "function.columns: {levle: extra_info.level}" in result.message


def test_openrlhf_query_is_prompt_and_completion_with_special_tokens() -> None:
    source = OPENRLHF + "[float(queries == ['2+2?4<end>'] and prompts == ['2+2?'] and labels == ['4'])]"
    assert run(source).score == 1.0
    outcome = run(source, rendered=None)
    assert outcome.reason == "exception"
    assert "the request has no rendered, which the function reads; the trainer sends it" in outcome.message


def test_answer_that_verl_names_is_kept_for_the_majority() -> None:
    assert run(VERL + "{'score': 1, 'pred': 'x'}") == Outcome(1.0, {}, pred="x")


@pytest.mark.parametrize("rewards", [np.array([0.5]), [0.5], np.float32(0.5), 0.5])
def test_openrlhf_rewards_may_be_array_list_or_number(rewards: Any) -> None:
    logged = {"rewards": rewards, "scores": np.array([1.0]), "extra_logs": {"length": np.array([3])}}
    assert read_rewards(logged, 1) == [Outcome(0.5, {"scores": 1.0, "length": 3.0})]
    assert read_rewards(rewards, 1) == [Outcome(0.5, {})]


def test_verl_fixture_runs() -> None:
    source = (REWARDS / "verl_gsm8k.py").read_text()
    assert run(source, completion="so #### 4") == Outcome(1.0, {"acc": 1.0}, pred="4")
    assert run(source, completion="so 4") == Outcome(0.0, {"acc": 0.0})


def test_trl_fixture_runs() -> None:
    source = (REWARDS / "trl_format.py").read_text()
    chat = {"prompt": [{"role": "user", "content": "2+2?"}], "completion": r"\boxed{4}"}
    assert run(source, **chat, extra_info={"split": "train"}) == Outcome(1.0, {"num_boxed": 1.0})
    assert run(source, **chat, extra_info={"split": "unlabelled"}).reason == "abstained"


def test_openrlhf_fixture_runs_with_real_tensors() -> None:
    pytest.importorskip("torch", reason="the fixture returns tensors")
    source = (REWARDS / "openrlhf_length.py").read_text()
    assert run(source) == Outcome(1.0, {"scores": 1.0, "length": 6.0})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "def compute_score(a, b): return 1",
            "function.py:1: compute_score(a, b) does not match a convention of reward functions",
        ),
        (
            "def compute_score(reward_inputs: list[dict[str, float]], length: int): return 1",
            "; map its parameters, such as ",
        ),
        (
            "\ndef compute_score(solution_str, completions): return 1",
            "function.py:2: compute_score(solution_str, completions) requires completions",
        ),
        ("def score(solution_str): return 1\ndef f(): pass", "(it defines score, f); set function.entrypoint"),
        ("x = 1", "it defines no function"),
        ("compute_score = 3", "compute_score is a int, not a function"),
        ("def compute_score(:\n", "function.py:1: SyntaxError"),
        (
            "\n\nimport no_such_module",
            "function.py:3: ModuleNotFoundError: No module named 'no_such_module'; add its package",
        ),
        ("from .helpers import score", "known parent package; a file is a part of a package as far as"),
        ("import math\nfrom math import sine", ") (while the file was imported)"),
        ("1/0", "function.py:1: ZeroDivisionError: division by zero (while the file was imported)"),
        ("import sys; sys.exit(0)", "function.py:1: SystemExit"),
        ("def compute_score(solution_str, /): return 1", "positional-only"),
        ("compute_score = max", "function.py: compute_score: its parameters cannot be read (no signature found"),
        ("\0", "function.py"),
    ],
)
def test_unservable_file_is_an_error_with_place_and_remedy(source: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load(FunctionSettings(source, "function.py", None, "auto", {}, 2048, signatures=REFERENCES))
    assert expected in str(caught.value)
    assert str(caught.value).count("\n") <= 3, "a line, and the three lines that adapt it"


def test_missing_module_is_an_error_with_a_remedy() -> None:
    with pytest.raises(UserError, match=r"No module named 'no_such_package'; add its package to"):
        load(FunctionSettings("", "", None, "auto", {}, 2048, signatures=REFERENCES, module="no_such_package.rewards"))


def test_unknown_kwargs_are_refused() -> None:
    with pytest.raises(UserError, match=r"does not accept factr.*function\.kwargs.*it takes factor, solution_str"):
        load(
            FunctionSettings(
                "def compute_score(solution_str, factor=1): ...",
                "f.py",
                None,
                "auto",
                {"factr": 1},
                2048,
                signatures=REFERENCES,
            )
        )


def test_exception_message_has_its_place_and_is_encodable() -> None:
    result = run("def compute_score(solution_str):\n    raise ValueError('\\ud800' + 'x' * 5000)")
    assert result.message.startswith("function.py:2: ValueError: ")
    assert len(result.message) <= 2000
    assert json.loads(json.dumps(result._asdict())) is not None
    assert result.message.encode()


def test_value_with_a_broken_repr_is_a_bad_return() -> None:
    source = "class Odd:\n    def __repr__(self): raise RuntimeError\ndef compute_score(solution_str): return Odd()"
    assert run(source).reason == "bad_return"


def test_infinite_components_are_dropped() -> None:
    assert outcome.read_components([("a", math.inf), ("b", "text"), ("c", True)]) == {"c": 1.0}


@pytest.mark.parametrize("made", ["functools.partial(inner)", "Called()"])
def test_nameless_callable_is_named_after_its_attribute(made: str) -> None:
    inner = "import functools\ndef inner(completions): return [1.0]\n"
    called = "class Called:\n    def __call__(self, completions): return [1.0]\n"
    assert (
        load(
            FunctionSettings(f"{inner}{called}reward = {made}", "f.py", None, "auto", {}, 2048, signatures=REFERENCES)
        ).entrypoint
        == "reward"
    )


def test_exception_group_reports_its_first_exception() -> None:
    raising = "async def fail():\n    raise ValueError('no key')\n"
    source = f"import asyncio\n{raising}async def compute_score(solution_str):\n"
    source += "    async with asyncio.TaskGroup() as tasks:\n        [tasks.create_task(fail()) for _ in range(2)]\n"
    assert run(source).message == "function.py:3: ValueError: no key (the first of 2)"
