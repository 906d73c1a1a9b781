"""Each block of docs/adapters.md, below a function with the project's signature, gives the project's score."""

import json
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_service.worker.forms.outcome import Outcome
from rljob_service.worker.load.loading import load
from rljob_service.worker.main import Executor
from rljob_service.worker.settings import FunctionSettings
from tests.support.adapters import ADAPTERS
from tests.support.plugins import REFERENCES

SAMPLE = {
    "id": "1",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "completion": "4",
    "ground_truth": "4",
    "data_source": "sums",
    "extra_info": {"level": 2, "index": 7, "metadata": {"digits": 1}},
    "prompt_ids": [1, 2],
    "completion_ids": [3, 4, 5],
}
AREAL = """
def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **columns):
    got = (prompt, completions, prompt_ids, completion_ids, answer, columns["level"])
    return float(got == ("2+2?", "4", [1, 2], [3, 4, 5], "4", 2))
"""
EASYR1 = """
def compute_score(reward_inputs, weight=0.5):
    return [
        {"overall": weight * (r["response"] == r["ground_truth"]) + r["level"], "accuracy": r["response_length"] / 4}
        for r in reward_inputs
    ]
"""
OPEN_INSTRUCT = """
import dataclasses
@dataclasses.dataclass
class VerificationResult:
    score: float
    cost: float = 0.0
    reasoning: str | None = None
class VerifierFunction:
    def __init__(self, name, weight=1.0, verifier_config=None): ...
class Match(VerifierFunction):
    def __init__(self, verifier_config=None):
        super().__init__("match", verifier_config=verifier_config)
    def __call__(self, tokenized_prediction, prediction, label, query=None, rollout_state=None):
        got = (tokenized_prediction, prediction, label, query)
        return VerificationResult(score=float(got == ([3, 4, 5], "4", "4", "2+2?")))
"""
OPENAI = """
def grade(sample, item):
    return 1.0 if (sample["output_text"], item["question"], item["level"]) == (item["answer"], "2+2?", 2) else 0.0
"""
RLLM = """
from types import SimpleNamespace
def evaluate(task: "Task", episode: "Episode") -> "EvalOutput":
    got = (task.instruction, task.metadata["level"], task.metadata["ground_truth"])
    right = got == ("2+2?", 2, "4") and episode.trajectories[-1].output == "4"
    return SimpleNamespace(reward=float(right), is_correct=right, signals=[], metadata={})
"""
RLLM_EARLIER = """
import dataclasses
@dataclasses.dataclass
class RewardOutput:
    reward: float
    metadata: dict
    is_correct: bool | None = None
def reward_fn(task_info, action):
    got = (task_info["question"], task_info["ground_truth"], task_info["data_source"], task_info["level"], action)
    return RewardOutput(reward=float(got == ("2+2?", "4", "sums", 2, "4")), metadata={}, is_correct=True)
"""
TRINITY = """
class RewardFn: ...
class MathRewardFn(RewardFn):
    def __call__(self, response, prompt=None, truth=None, **kwargs):
        return {"accuracy": float((response, prompt, truth) == ("4", "2+2?", "4")), "format_score": -0.25}
"""
ENTRY = {"question": "2+2?", "answer": "4", "metadata": {"digits": 1}, "level": 2, "index": 7}


class Grids:
    """A dataset whose entries have tuples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"answer": str((index - 3,))}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float((int(answer),) == tuple(map(int, entry["answer"].strip("(),"))))


GYM = SimpleNamespace(
    get_score_answer_fn=lambda name: lambda answer, entry: float((name, answer, entry) == ("leg_counting", "4", ENTRY)),
    create_dataset=lambda name, *, seed, size: Grids(),
)
"""Implements what the page uses of reasoning_gym, which `make test-packages` installs."""

CASES = [
    ("AReaL", 0, AREAL, None, Outcome(1.0, {})),
    ("EasyR1", 0, EASYR1, "adapted", Outcome(2.5, {"overall": 2.5, "accuracy": 0.75})),
    ("open-instruct", 0, OPEN_INSTRUCT, None, Outcome(1.0, {"cost": 0.0})),
    ("OpenAI's graders", 0, OPENAI, None, Outcome(1.0, {})),
    ("reasoning_gym", 0, "import reasoning_gym\n", None, Outcome(1.0, {})),
    ("reasoning_gym", 1, "import reasoning_gym\n", None, Outcome(1.0, {})),
    ("rLLM", 0, RLLM, None, Outcome(1.0, {})),
    ("rLLM", 1, RLLM_EARLIER, None, Outcome(1.0, {})),
    ("Trinity-RFT", 0, TRINITY, None, Outcome(0.75, {"accuracy": 1.0, "format_score": -0.25})),
]


def score(source: str, entrypoint: str | None, sample: dict[str, Any]) -> Outcome:
    """Return what a worker makes of the sample, without a signature."""
    settings = FunctionSettings(
        source=source,
        path="reward.py",
        entrypoint=entrypoint,
        signature="auto",
        kwargs={},
        max_memory_bytes=2 << 30,
        scope="sample",
        signatures=REFERENCES,
    )
    [outcome] = Executor(load(settings), settings).execute(json.dumps(sample).encode())
    return outcome


@pytest.mark.parametrize(("project", "number", "own", "entrypoint", "expected"), CASES, ids=lambda each: str(each)[:16])
def test_adapter_of_the_page_gives_the_score_of_the_project(
    project: str, number: int, own: str, entrypoint: str | None, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", GYM)
    monkeypatch.setitem(sys.modules, "rllm", SimpleNamespace())
    types = dict.fromkeys(("Task", "Episode", "Trajectory"), SimpleNamespace)
    monkeypatch.setitem(sys.modules, "rllm.types", SimpleNamespace(**types))
    source = own + ADAPTERS[project][number]
    assert score(source, entrypoint, SAMPLE) == expected
    wrong = score(source, entrypoint, {**SAMPLE, "completion": "5"})
    assert wrong.score is not None
    assert expected.score is not None
    assert wrong.score < expected.score, "a wrong answer gets less"


@pytest.mark.parametrize(("project", "own"), [(case[0], case[2]) for case in CASES if "def " in case[2]])
def test_without_the_adapter_nothing_is_scored(project: str, own: str) -> None:
    """A form that is guessed wrongly would be a false zero."""
    with suppress(UserError):
        found = score(own, {"Trinity-RFT": "MathRewardFn", "open-instruct": "Match"}.get(project), SAMPLE)
        assert found.score is None


def test_every_block_of_the_page_is_tested() -> None:
    blocks = [(project, number) for project, found in ADAPTERS.items() for number in range(len(found))]
    assert blocks == [case[:2] for case in CASES]
