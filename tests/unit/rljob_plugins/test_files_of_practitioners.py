"""Rewards in the forms of files that practitioners have: the scores of their own trainer's call, and those here.

Each source is ours, with the parameters of the file that is named, and the same use of its arguments. `scores` are what
the file itself gave to a right, a wrong and an empty answer when it was called as its trainer calls it, and by
`rljob test-reward`. The files are not on PyPI; tests/integration/packaged_rewards runs what is.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest

from rljob_service.worker.load.loading import load
from rljob_service.worker.main import Executor
from rljob_service.worker.settings import FunctionSettings
from tests.support.plugins import REFERENCES

ASKED = "Write the answer as <answer> 1 + 2 </answer>."
CHAT = [{"role": "user", "content": ASKED}]
START, END = f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"


def reply(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


class Brought(NamedTuple):
    name: str
    """Repository, file, commit."""
    source: str
    completions: list[str]
    """Right, wrong, empty."""
    scores: list[float]
    answer: Any
    call: Callable[[dict[str, Any], str, Any], float]
    """As the file's own trainer calls it: (its names, completion, answer)."""
    settings: dict[str, Any] = {}
    """What the job needs."""
    column: str = ""
    others: dict[str, Any] = {}
    """Further columns."""


COUNTDOWN = """
import re
def find_equation(text):
    if "Assistant:" in text:
        text = text.split("Assistant:", 1)[1]
    elif "<|im_start|>assistant" in text:
        text = text.split("<|im_start|>assistant", 1)[1]
    else:
        return None
    found = re.findall(r"<answer>(.*?)</answer>", text.split("\\n")[-1])
    return found[-1] if found else None
def compute_score(solution_str, ground_truth, method="strict", format_score=0.1, score=1.0):
    equation = find_equation(solution_str)
    if equation is None:
        return 0
    numbers = sorted(map(int, re.findall(r"\\d+", equation)))
    right = numbers == sorted(ground_truth["numbers"]) and eval(equation) == ground_truth["target"]
    return score if right else format_score
"""
EXACT_MATCH = """
import re
def compute_score_em(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    found = re.findall(r"<answer>(.*?)</answer>", solution_str)  # the first one is the prompt's
    return (score if found[-1].strip() in ground_truth["target"] else format_score) if len(found) > 1 else 0
"""
TOOL_RL = """
def compute_score(solution_str, ground_truth, step=0):
    answer = solution_str.split("<|im_start|>assistant")[-1].split("<|im_end|>")[0].strip()
    form = float(answer.startswith("<think>")) if step < 30 else 0.0
    right = 3.0 if answer == ground_truth else -3.0
    return form + right, form, right, 0
"""
ORM = """
class ORM:
    def __init__(self, args=None, **kwargs):
        self.args = args
"""
SWIFT = f"""{ORM}
class CountdownORM(ORM):
    def __call__(self, completions, target, nums, **kwargs):
        return [float("<think>" in c and str(n) in c and t == 98) for c, t, n in zip(completions, target, nums)]
class ToolUseCorrectnessReward(ORM):
    def __call__(self, completions, solution, **kwargs):
        most = 3.0 if kwargs.get("trainer_state").global_step < 30 else 1.0
        return [most if c == s else -most for c, s in zip(completions, solution)]
class MultiTurnThinkingTips(ORM):
    def __call__(self, completions, **kwargs):
        rows = [kwargs.get("trajectory_inputs")[request][-1] for request in kwargs.get("request_id")]
        return [float(row["messages"][-1]["content"] == row["solution"]) for row in rows]
"""
TEXTS = """
import re
def check_answer(prompts, completions, answer, **kwargs):
    found = [re.search("<answer>(.+?)</answer>", text) for text in completions]
    return [0 if each is None else 3.0 if each[1] == a else -1.0 for each, a in zip(found, answer)]
"""
DEMO = """
def read(text):
    return text.split("<answer>")[-1].split("</answer>")[0].strip()
def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    assert prompts[0][-1]["content"]
    return [2.0 if read(c[0]["content"]) == a else 0.0 for c, a in zip(completions, answer)]
def int_reward_func(completions, **kwargs) -> list[float]:
    return [0.5 if read(c[0]["content"]).isdigit() else 0.0 for c in completions]
def format_reward_func(completions, **kwargs) -> list[float]:
    return [1.5 if "<reasoning>" in c[0]["content"] else 0.0 for c in completions]
"""
BY_KWARGS = """
import re
class MathAnswerReward:
    def __call__(self, **kwargs):
        found = [re.search(r"boxed.(\\d+)", text) for text in kwargs.get("completions", [])]
        answers = kwargs.get("answers", [])
        return [float(bool(each) and a.endswith(f"#### {each[1]}")) for each, a in zip(found, answers)]
"""


def with_prompt(name: str, **more: Any) -> Callable[[dict[str, Any], str, Any], float]:
    """Return the call of verl before March 2025: of prompt and answer as one text."""

    def call(names: dict[str, Any], completion: str, answer: Any) -> float:
        score = names[name](solution_str=f"{START}{completion}{END}", ground_truth=answer, **more)
        return score[0] if isinstance(score, tuple) else score

    return call


def of_class(name: str, column: str, **others: Any) -> Callable[[dict[str, Any], str, Any], float]:
    """Return ms-swift's call: of texts, rows and the state of the trainer."""

    def call(names: dict[str, Any], completion: str, answer: Any) -> float:
        row = {"messages": [*CHAT, *reply(completion)], column: answer}
        columns = {column: [answer], **{name: [value] for name, value in others.items()}}
        state = SimpleNamespace(global_step=0, max_steps=100)
        return names[name]()(
            [completion], **columns, trainer_state=state, request_id=["1"], trajectory_inputs={"1": [row]}
        )[0]

    return call


def summed(names: dict[str, Any], completion: str, answer: Any) -> float:
    functions = [value for name, value in names.items() if name.endswith("_func")]
    return sum(each(prompts=[CHAT], completions=[reply(completion)], answer=[answer])[0] for each in functions)


SLIME = """
from slime.utils.types import Sample
async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample) or sample.status is not Sample.Status.COMPLETED:
        raise TypeError("Sample must be an instance of Sample class.")
    found = (sample.prompt + sample.response).split("<answer>")[2:]  # the first one is the prompt's
    return float(bool(found) and found[-1].split("</answer>")[0].strip() in sample.label["target"])
"""


@dataclass
class SlimesSample:
    prompt: str | list[dict[str, str]] = ""
    response: str = ""
    label: Any = None
    status: Any = None
    Status: ClassVar = Enum("Status", {"COMPLETED": "completed", "TRUNCATED": "truncated"})


def of_sample(names: dict[str, Any], completion: str, answer: Any) -> float:
    sample = SlimesSample(START, completion, answer, SlimesSample.Status.COMPLETED)
    score: float = asyncio.run(names["reward_func"](None, sample))
    return score


THOUGHT = "<think>a</think>\n<answer>44 + 19 + 35</answer>"
CALLED = '<think> a </think>\n<tool_call>\n{"name": "f"}\n</tool_call>'
TAGGED = ["<reasoning>x</reasoning><answer>2</answer>", "<answer>3</answer>", ""]
NUMBERS = {"target": 98, "numbers": [44, 19, 35]}

FILES = [
    Brought(
        "TinyZero countdown.py f36b1b8d",
        COUNTDOWN,
        ["<answer>44 + 19 + 35</answer>", "<answer>1 + 2</answer>", ""],
        [1.0, 0.1, 0.0],
        NUMBERS,
        with_prompt("compute_score"),
    ),
    Brought(
        "Search-R1 qa_em.py a14dc3a",
        EXACT_MATCH,
        ["<answer> 2,718 </answer>", "<answer> 3 </answer>", ""],
        [1.0, 0.0, 0.0],
        {"target": ["2,718"]},
        with_prompt("compute_score_em"),
        {"signature": "verl0.2"},  # which validate names
    ),
    Brought(
        "ToolRL rlla.py 8cee13e",
        TOOL_RL,
        [CALLED, CALLED.replace('"f"', '"g"'), ""],
        [4.0, -2.0, -3.0],
        CALLED,
        with_prompt("compute_score", step=1),
    ),
    Brought(
        "ms-swift plugin.py 3602360a CountdownORM",
        SWIFT,
        [THOUGHT, "<answer>1</answer>", ""],
        [1.0, 0.0, 0.0],
        98,
        of_class("CountdownORM", "target", nums=19),
        {"entrypoint": "CountdownORM"},
        "target",
        {"nums": 19},
    ),
    Brought(
        "ms-swift plugin.py 3602360a ToolUseCorrectnessReward",
        SWIFT,
        [CALLED, "<answer>1</answer>", ""],
        [3.0, -3.0, -3.0],
        CALLED,
        of_class("ToolUseCorrectnessReward", "solution"),
        {"entrypoint": "ToolUseCorrectnessReward"},
        "solution",
    ),
    Brought(
        "ms-swift plugin.py 3602360a MultiTurnThinkingTips",
        SWIFT,
        ["2", "3", ""],
        [1.0, 0.0, 0.0],
        "2",
        of_class("MultiTurnThinkingTips", "solution"),
        {"entrypoint": "MultiTurnThinkingTips"},
        "solution",
    ),
    Brought(
        "Tunix gsm8k.py c7d8950f check_answer",
        TEXTS,
        ["<answer>2</answer>", "<answer>3</answer>", ""],
        [3.0, -1.0, 0.0],
        "2",
        lambda names, text, a: names["check_answer"](prompts=[ASKED], completions=[text], answer=[a])[0],
        {"signature": "trl", "columns": {"completions": "completion"}},  # which validate names
        "answer",
    ),
    Brought(
        "gpu-rl grpo_demo.py e75ef44b, its functions in a file of their own",
        DEMO,
        TAGGED,
        [4.0, 0.5, 0.0],
        "2",
        summed,
        {"entrypoint": "correctness_reward_func, int_reward_func, format_reward_func"},
        "answer",
    ),
    Brought(
        "Pyrros rewards.py 623d854 MathAnswerReward",
        BY_KWARGS,
        ["\\boxed{2}", "\\boxed{3}", ""],
        [1.0, 0.0, 0.0],
        "#### 2",
        lambda names, text, a: names["MathAnswerReward"]()(completions=[text], answers=[a])[0],
        {"entrypoint": "MathAnswerReward", "signature": "trl"},
        "answers",
    ),
    Brought(
        "slime examples/search-r1 624b824a, without its generate",
        SLIME,
        ["<answer> 2,718 </answer>", "<answer> 3 </answer>", ""],
        [1.0, 0.0, 0.0],
        {"target": ["2,718"]},
        of_sample,
    ),
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_scores_are_those_of_the_files_own_trainer(file: Brought, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("slime", "slime.utils", "slime.utils.types"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Sample=SlimesSample))
    names: dict[str, Any] = {}
    exec(file.source, names)
    own = [file.call(names, completion, file.answer) for completion in file.completions]
    given = {"kwargs": {}, "max_memory_bytes": 0, "signatures": REFERENCES, "entrypoint": None, "signature": "auto"}
    settings = FunctionSettings(source=file.source, path="file.py", **{**given, **file.settings})
    executor = Executor(load(settings), settings)
    prompt: Any = ASKED if file.source is BY_KWARGS else CHAT  # data.format: text
    here = []
    for completion in file.completions:
        sample = {
            "id": "1",
            "prompt": prompt,
            "completion": completion,
            "ground_truth": file.answer,
            "answer_column": file.column,
            "extra_info": {**file.others},
            "rendered": {"prompt": START, "query": f"{START}{completion}{END}"},
            "prompt_ids": [1],
            "completion_ids": [2],
            "finished_steps": 0,
            "total_steps": 100,
        }
        [outcome] = executor.execute(json.dumps(sample).encode())
        assert outcome.reason is None, outcome.message
        here.append(outcome.score)
    assert own == here == file.scores
