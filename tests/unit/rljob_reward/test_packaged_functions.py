"""verl's, TRL's and OpenRLHF's own reward functions through a real server, equal to calling them directly.

They are imported from their packages, of which TRL comes with the bench group; the others where they are installed
(`uv pip install --no-deps verl openrlhf math-verify latex2sympy2-extended`). Nothing of theirs is copied here.
"""

from __future__ import annotations

import importlib.metadata
import runpy
from collections.abc import Callable
from typing import Any

import pytest
from reward_process import Server

StartServer = Callable[..., Server]

LARGE = {"slots": 1, "timeoutSeconds": 120}
MEMORY = {"maxMemoryMiB": 1 << 16}
THINKING = "<think>\nIt is a third.\n</think>\nSo \\boxed{\\frac{1}{3}}"
COMPLETIONS = [
    THINKING,
    "It is \\boxed{\\frac{2}{6}}.",
    "It is \\boxed{\\frac{1}{2}}",
    "a third",
    "#### 42",
    "#### 1,042 or 42",
    "",
    "\\boxed{42}",
]
ANSWERS = ["\\frac{1}{3}", "42"]
SAMPLES = [(completion, answer) for completion in COMPLETIONS for answer in ANSWERS]


def import_or_skip(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


def scores_of(server: Server, **fields: Any) -> list[tuple[float | None, str | None]]:
    """(score, reason) of every sample; a failure would have one of the reasons that say so."""
    results = [server.score(c, ground_truth=a, **fields) for c, a in SAMPLES]
    assert not [r["message"] for r in results if r["reason"] not in (None, "abstained")]
    return [(result["score"], result["reason"]) for result in results]


def expected(scores: list[Any]) -> list[tuple[float | None, str | None]]:
    return [(None, "abstained") if score is None else (float(score), None) for score in scores]


@pytest.mark.parametrize("name", ["gsm8k", "math_reward", "math_dapo"])
def test_verls_scorers_as_files(start_server: StartServer, name: str) -> None:
    try:
        package = importlib.metadata.distribution("verl")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("verl is not installed")
    file = str(package.locate_file(f"verl/utils/reward_score/{name}.py"))
    compute_score = runpy.run_path(file)["compute_score"]
    server = start_server(None, function={"file": file}, **LARGE)
    direct = [compute_score(completion, answer) for completion, answer in SAMPLES]
    direct = [value["score"] if isinstance(value, dict) else value for value in direct]
    assert scores_of(server) == expected(direct)


def test_verls_default_scorer_chooses_by_the_data_source(start_server: StartServer) -> None:
    package = import_or_skip("verl.utils.reward_score")
    function = {"module": package.__name__, "entrypoint": "default_compute_score", **MEMORY}
    server = start_server(None, function=function, **LARGE)
    for source in ("openai/gsm8k", "lighteval/MATH"):
        direct = [package.default_compute_score(source, completion, answer) for completion, answer in SAMPLES]
        assert scores_of(server, data_source=source) == expected(direct)
    assert "NotImplementedError" in server.score("x", data_source="unknown")["message"]


@pytest.mark.parametrize(
    ("name", "needs"),
    [("accuracy_reward", "math_verify"), ("reasoning_accuracy_reward", "math_verify"), ("think_format_reward", "trl")],
)
def test_trls_functions(start_server: StartServer, name: str, needs: str) -> None:
    rewards = import_or_skip("trl.rewards")
    import_or_skip(needs)
    server = start_server(None, function={"module": "trl.rewards", "entrypoint": name, **MEMORY}, **LARGE)
    chats = [[[{"role": "assistant", "content": completion}]] for completion, _ in SAMPLES]
    function = getattr(rewards, name)
    direct = [
        function(completions=chat, solution=[answer])[0] for chat, (_, answer) in zip(chats, SAMPLES, strict=True)
    ]
    assert scores_of(server, prompt=[{"role": "user", "content": "?"}]) == expected(direct)


def test_trls_punishment_of_long_completions_by_their_number_of_tokens(start_server: StartServer) -> None:
    rewards = import_or_skip("trl.rewards")
    # It is made by a call, and of the tokens looks at their number alone, which every request carries.
    source = """
from trl.rewards import get_soft_overlong_punishment
punish = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
def reward(completions, num_tokens, **columns):
    return punish([range(num) for num in num_tokens])
"""
    server = start_server(source, function=MEMORY, **LARGE)
    punish = rewards.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    for num in (10, 80, 90, 100, 120):
        result = server.score("x", extra_info={"num_tokens": num})
        assert result["score"] == punish([[0] * num])[0], num


def test_openrlhfs_grader(start_server: StartServer) -> None:
    utils = import_or_skip("openrlhf.utils")
    source = """
import torch
from openrlhf.utils import extract_boxed_answer, grade_answer
def reward_func(queries, prompts, labels, **kwargs):
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    rewards = [float(grade_answer(extract_boxed_answer(a), label)) for a, label in zip(answers, labels)]
    rewards = torch.tensor(rewards)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"math_accuracy": rewards.mean()}}
"""
    server = start_server(source, function=MEMORY, **LARGE)
    direct = [utils.grade_answer(utils.extract_boxed_answer(completion), answer) for completion, answer in SAMPLES]
    assert scores_of(server) == expected(direct)
    assert server.score("\\boxed{42}", ground_truth="42")["components"] == {"scores": 1.0, "math_accuracy": 1.0}


def test_math_verify_as_people_call_it(start_server: StartServer) -> None:
    math_verify = import_or_skip("math_verify")
    source = """
from math_verify import parse, verify
def compute_score(solution_str, ground_truth):
    return float(verify(parse("$" + ground_truth + "$"), parse(solution_str)))
"""
    server = start_server(source, function=MEMORY, **LARGE)
    parse, verify = math_verify.parse, math_verify.verify
    direct = [float(verify(parse(f"${answer}$"), parse(completion))) for completion, answer in SAMPLES]
    assert scores_of(server) == expected(direct)
