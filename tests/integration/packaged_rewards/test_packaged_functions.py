"""Reward functions of verl, TRL and OpenRLHF, written as in docs/coming-from.md, through a real server.

The reward's `requirements` install each package into the user's cache, apart from the server: seconds if the lock
file's torch is in uv's cache. Its interpreter then calls the same function directly, with the same answers. Scores,
abstentions and errors must be equal. No code of these packages is copied here.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_service.pool import requirements
from tests.paths import ROOT
from tests.support.reward_process import Server, build_group
from tests.support.waiting import DEADLINE_SECONDS

StartServer = Callable[..., Server]
Outcome = tuple[float | None, str | None]

COMING_FROM = ROOT / "docs" / "coming-from.md"
TORCH = f"torch=={importlib.metadata.version('torch')}"
"""The build that the lock file has installed already."""
pytestmark = pytest.mark.slow

UNBUILDABLE = "deepspeed\nflash-attn\nbitsandbytes\n"

WORKED_SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips altogether.\n"
COMPLETIONS = {
    "right": WORKED_SOLUTION + "#### 72",
    "right, boxed": WORKED_SOLUTION + "The answer is \\boxed{72}.",
    "right, after thinking": f"<think>\n{WORKED_SOLUTION}</think>\nAnswer: 72. So \\boxed{{72}}",
    "right, another form": "It is \\boxed{\\frac{144}{2}}",
    "a fraction": "Answer: \\frac{1}{3}. It is \\boxed{\\frac{1}{3}}",
    "wrong": WORKED_SOLUTION + "#### 71",
    "wrong, boxed": "Answer: 71, \\boxed{71}",
    "with thousands": "#### 1,072",
    "with currency": "#### $72",
    "two answers": "#### 71\nno, wait\n#### 72",
    "negative": "#### -72 and \\boxed{-72}",
    "malformed": "#### seventy-two \\boxed{72",
    "malformed LaTeX": "\\boxed{\\frac{72}{}}",
    "truncated": (WORKED_SOLUTION * 40)[:2000] + "#### 7",
    "empty": "",
    "spaces": " \n\t ",
    "unicode": "答えは \\boxed{７２} です 🧮 #### 72",
    "arabic digits": "#### ٧٢",
    "control characters": "\x00\x1b[31m#### 72\x7f",
}
ANSWERS = ["72", "\\frac{1}{3}", "", "no number at all", "#### 72"]
SAMPLES = [(completion, answer) for completion in COMPLETIONS.values() for answer in ANSWERS]

DIRECT_CALL = """
import contextlib, io, json, sys
call = {}
samples = json.load(sys.stdin)
with contextlib.redirect_stdout(io.StringIO()):
    exec(sys.argv[1], call)
    outcomes = []
    for sample in samples:
        try:
            outcomes.append([call["call"](*sample), None])
        except Exception as error:
            outcomes.append([None, type(error).__name__])
print(json.dumps(outcomes))
"""


def documented(name: str) -> dict[str, Any]:
    """Return the function of the reward with this name in the guide."""
    parts = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", COMING_FROM.read_text(), re.S)]
    [found] = [reward for part in parts for reward in part.get("rewards", []) if reward["name"] == name]
    function: dict[str, Any] = found["function"]
    return function | {"requirements": [*function["requirements"], TORCH]}


def start(start_server: StartServer, function: dict[str, Any], **fields: Any) -> Server:
    return start_server(None, function=function, slots=1, timeoutSeconds=DEADLINE_SECONDS, **fields)


def score_by_server(server: Server, samples: list[tuple[str, str]], **fields: Any) -> list[Outcome]:
    """Return (score, None), (None, "abstained") or (None, name of the exception) for each sample."""
    results = [
        server.score(completion, ground_truth=answer, rendered={"prompt": "p", "query": f"p{completion}"}, **fields)
        for completion, answer in samples
    ]
    for result in results:
        assert result["valid"] or result["reason"] in ("abstained", "exception"), result
    return [
        (result["score"], result["message"].split(":")[0] if result["reason"] == "exception" else result["reason"])
        for result in results
    ]


def score_directly(function: dict[str, Any], source: str, samples: list[tuple[str, str]]) -> list[Outcome]:
    """Run `call(completion, answer)` of the source in the interpreter with the reward's packages."""
    python = requirements.ensure_environment(function["requirements"])  # the server has created it
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [python, "-c", DIRECT_CALL, source]
    done = subprocess.run(
        command, input=json.dumps(samples), env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    return [
        (None, error) if error else (None, "abstained") if score is None else (float(score), None)
        for score, error in outcomes
    ]


def assert_equal(found: list[Outcome], expected: list[Outcome], samples: list[tuple[str, str]]) -> None:
    different = [
        f"{completion[-60:]!r} for {answer!r}: {actual} through the server, {direct} directly"
        for (completion, answer), actual, direct in zip(samples, found, expected, strict=True)
        if actual != direct
    ]
    assert not different, "\n".join(different)
    assert len({outcome for outcome in expected if outcome[1] is None}) > 1, "the samples must have different scores"


def test_verl_scorers_by_data_source_match_direct_calls(
    start_server: StartServer,
) -> None:
    function = documented("verl")
    server = start(start_server, function)
    for source in ("openai/gsm8k", "lighteval/MATH", "math_dapo"):
        call = f"""
from verl.utils.reward_score import default_compute_score
def call(completion, answer):
    score = default_compute_score({source!r}, completion, answer)
    return score["score"] if isinstance(score, dict) else score
"""
        assert_equal(
            score_by_server(server, SAMPLES, data_source=source), score_directly(function, call, SAMPLES), SAMPLES
        )
    unknown = server.score("#### 72", ground_truth="72", data_source="somewhere/else")
    assert (unknown["valid"], unknown["reason"]) == (False, "exception"), "an exception is not a zero"
    assert "NotImplementedError" in unknown["message"]
    extras = server.score("Answer: 72", ground_truth="72", data_source="math_dapo")
    assert extras["components"] == {"acc": 1.0}, "other numbers become components"


def test_verl_batch_scorer_matches_direct_calls_for_a_group(
    start_server: StartServer,
) -> None:
    function = documented("verl") | {
        "module": "verl.utils.reward_score.math_batch",
        "entrypoint": "compute_score_batched",
    }
    server = start(start_server, function, scope="group")
    result = server.score_group(build_group(*COMPLETIONS.values(), ground_truth="72"))
    call = """
from verl.utils.reward_score.math_batch import compute_score_batched
def call(completion, answer):
    return compute_score_batched(["x"], [completion], [answer], [{}])[0]
"""
    samples = [(completion, "72") for completion in COMPLETIONS.values()]
    assert_equal(
        [(each.score, each.reason) for each in result.results], score_directly(function, call, samples), samples
    )


def test_verl_scorer_as_a_file_needs_no_package(start_server: StartServer, tmp_path: Path) -> None:
    function = documented("verl")
    python = Path(requirements.ensure_environment(function["requirements"]))
    [packaged] = python.parents[1].glob("lib/python*/site-packages/verl/utils/reward_score/gsm8k.py")
    file = tmp_path / "gsm8k.py"
    file.write_bytes(packaged.read_bytes())
    server = start(start_server, {"file": str(file)})
    call = "from verl.utils.reward_score.gsm8k import compute_score as call"
    assert_equal(score_by_server(server, SAMPLES), score_directly(function, call, SAMPLES), SAMPLES)


@pytest.mark.parametrize(
    ("name", "entrypoint"),
    [
        ("accuracy", "accuracy_reward"),
        ("accuracy", "reasoning_accuracy_reward"),
        ("format", "think_format_reward"),
    ],
)
def test_trl_functions_match_direct_calls_and_none_is_an_abstention(
    start_server: StartServer, name: str, entrypoint: str
) -> None:
    function = documented(name) | {"entrypoint": entrypoint}
    server = start(start_server, function)
    call = f"""
from trl.rewards import {entrypoint} as reward
def call(completion, answer):
    return reward(completions=[[{{"role": "assistant", "content": completion}}]], solution=[answer])[0]
"""
    samples = SAMPLES + [(f"<think>{completion}</think>{completion}", "72") for completion in COMPLETIONS.values()]
    expected = score_directly(function, call, samples)
    assert_equal(score_by_server(server, samples, prompt=[{"role": "user", "content": "?"}]), expected, samples)
    assert ((None, "abstained") in expected) == (name == "accuracy"), "the samples must include unreadable answers"


def test_trl_overlong_punishment_is_made_by_its_factory(start_server: StartServer) -> None:
    function = documented("length")
    server = start(start_server, function)
    lengths = [0, 1, 895, 896, 897, 960, 1023, 1024, 1025, 100_000]
    call = """
from trl.rewards import get_soft_overlong_punishment
punish = get_soft_overlong_punishment(max_completion_len=1024, soft_punish_cache=128)
def call(completion, answer):
    return punish([[7] * int(answer)])[0]
"""
    found = [server.score("x", prompt_ids=[1], completion_ids=[7] * num)["score"] for num in lengths]
    assert [(score, None) for score in found] == score_directly(function, call, [("x", str(num)) for num in lengths])


@pytest.fixture
def without_unbuildable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exclude packages as docs/coming-from.md describes for OpenRLHF."""
    exclude = tmp_path / "exclude.txt"
    exclude.write_text(UNBUILDABLE)
    monkeypatch.setenv("UV_EXCLUDE", str(exclude))


@pytest.mark.usefixtures("without_unbuildable")
def test_openrlhf_grader_matches_direct_calls(start_server: StartServer) -> None:
    function = documented("openrlhf")
    server = start(start_server, function)
    call = """
from openrlhf.utils import extract_boxed_answer, grade_answer
def call(completion, answer):
    return float(grade_answer(extract_boxed_answer(completion), answer))
"""
    assert_equal(score_by_server(server, SAMPLES), score_directly(function, call, SAMPLES), SAMPLES)


def test_math_verify_matches_direct_calls(start_server: StartServer) -> None:
    source = """
from math_verify import parse, verify
def compute_score(solution_str, ground_truth):
    return float(verify(parse("$" + ground_truth + "$"), parse(solution_str)))
"""
    function = {"inline": source, "requirements": ["math-verify==0.9.0"]}
    call = f"{source}\ndef call(completion, answer):\n    return compute_score(completion, answer)"
    assert_equal(
        score_by_server(start(start_server, function), SAMPLES), score_directly(function, call, SAMPLES), SAMPLES
    )


_PARTS_OF_DATA = ("path", "name", "data_files", "split")


def test_settings_in_the_guide_exist_in_the_packages(request: pytest.FixtureRequest) -> None:
    table = (
        COMING_FROM.read_text().partition("| here | verl | TRL (`GRPOConfig`) | OpenRLHF |")[2].partition("\n## ")[0]
    )
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    verl, trl, openrlhf = ([name for row in rows for name in re.findall(r"`([^`]+)`", row[i])] for i in (1, 2, 3))
    assert min(len(verl), len(trl), len(openrlhf)) > 25
    assert not sorted(set(verl) - _verl_settings())
    of_script = {"model", "model.name", "model.model_name", "AsyncGRPOTrainer"}
    of_script |= {"r", "lora_alpha", "lora_dropout", "target_modules"}  # of peft_config
    of_script |= {f"{name}_dataset.{part}" for name in ("train", "eval") for part in _PARTS_OF_DATA}
    of_script |= {"warmup_ratio", "max_prompt_length"}  # of earlier versions
    assert not sorted(set(trl) - _trl_settings() - of_script - {"trl vllm-serve", "accelerate launch"})
    request.getfixturevalue("without_unbuildable")  # after the other lookups, which need environments without it
    assert not sorted(set(openrlhf) - _openrlhf_settings())


def _site_packages(reward: str) -> Path:
    [folder] = (
        Path(requirements.ensure_environment(documented(reward)["requirements"]))
        .parents[1]
        .glob("lib/python*/site-packages")
    )
    return folder


def _verl_settings() -> set[str]:
    file = _site_packages("verl") / "verl/trainer/config/_generated_ppo_trainer.yaml"

    def paths(node: Any, prefix: str) -> set[str]:
        if not isinstance(node, dict):
            return {prefix}
        return {prefix}.union(*(paths(child, f"{prefix}.{key}" if prefix else key) for key, child in node.items()))

    return paths(yaml.safe_load(file.read_text()), "")


def _trl_settings() -> set[str]:
    site = _site_packages("accuracy")
    files = [*site.glob("trl/trainer/*_config.py"), site / "transformers/training_args.py"]
    classes = [node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    wanted = [node for node in classes if node.name in ("GRPOConfig", "_BaseConfig", "TrainingArguments")]
    return {
        statement.target.id
        for node in wanted
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _openrlhf_settings() -> set[str]:
    text = (_site_packages("openrlhf") / "openrlhf/cli/train_ppo_ray.py").read_text()
    names = re.findall(r'"(--[A-Za-z0-9_.{}]+)"', text)
    return {name.replace("{prefix}", model) for name in names for model in ("actor", "critic")}
