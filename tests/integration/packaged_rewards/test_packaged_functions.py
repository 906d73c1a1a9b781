"""verl's, TRL's and OpenRLHF's own reward functions, as docs/coming-from.md writes them, through a real server.

Each package is installed by the reward's own `requirements`, apart from the server, in the user's cache: seconds where
the lock file's torch is in uv's cache. Its interpreter then calls the same function directly, over the same answers;
scores, abstentions and errors must be equal. Nothing of theirs is copied here.
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

from rljob_reward.workers import requirements
from tests.paths import ROOT
from tests.support.reward_process import DEADLINE_SECONDS, Server, build_group

StartServer = Callable[..., Server]
Outcome = tuple[float | None, str | None]

COMING_FROM = ROOT / "docs" / "coming-from.md"
TORCH = f"torch=={importlib.metadata.version('torch')}"
"""Of all builds that would do, the one that the lock file has brought already."""
UNBUILDABLE = "deepspeed\nflash-attn\nbitsandbytes\n"

WORKED = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips altogether.\n"
COMPLETIONS = {
    "right": WORKED + "#### 72",
    "right, boxed": WORKED + "The answer is \\boxed{72}.",
    "right, after thinking": f"<think>\n{WORKED}</think>\nAnswer: 72. So \\boxed{{72}}",
    "right, another form": "It is \\boxed{\\frac{144}{2}}",
    "a fraction": "Answer: \\frac{1}{3}. It is \\boxed{\\frac{1}{3}}",
    "wrong": WORKED + "#### 71",
    "wrong, boxed": "Answer: 71, \\boxed{71}",
    "with thousands": "#### 1,072",
    "with currency": "#### $72",
    "two answers": "#### 71\nno, wait\n#### 72",
    "negative": "#### -72 and \\boxed{-72}",
    "malformed": "#### seventy-two \\boxed{72",
    "malformed LaTeX": "\\boxed{\\frac{72}{}}",
    "truncated": (WORKED * 40)[:2000] + "#### 7",
    "empty": "",
    "spaces": " \n\t ",
    "unicode": "答えは \\boxed{７２} です 🧮 #### 72",
    "arabic digits": "#### ٧٢",
    "control characters": "\x00\x1b[31m#### 72\x7f",
}
ANSWERS = ["72", "\\frac{1}{3}", "", "no number at all", "#### 72"]
SAMPLES = [(completion, answer) for completion in COMPLETIONS.values() for answer in ANSWERS]

DIRECTLY = """
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
    """The function of the reward with this name in the guide."""
    parts = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", COMING_FROM.read_text(), re.S)]
    [found] = [reward for part in parts for reward in part.get("rewards", []) if reward["name"] == name]
    function: dict[str, Any] = found["function"]
    return function | {"requirements": [*function["requirements"], TORCH]}


def start(start_server: StartServer, function: dict[str, Any], **fields: Any) -> Server:
    return start_server(None, function=function, slots=1, timeoutSeconds=DEADLINE_SECONDS, **fields)


def through_the_server(server: Server, samples: list[tuple[str, str]], **fields: Any) -> list[Outcome]:
    """(score, None), (None, abstained), or (None, the name of the exception)."""
    results = [server.score(completion, ground_truth=answer, **fields) for completion, answer in samples]
    for result in results:
        assert result["valid"] or result["reason"] in ("abstained", "exception"), result
    return [
        (result["score"], result["message"].split(":")[0] if result["reason"] == "exception" else result["reason"])
        for result in results
    ]


def directly(function: dict[str, Any], source: str, samples: list[tuple[str, str]]) -> list[Outcome]:
    """What `call(completion, answer)` of the source gives in an interpreter that has the reward's packages."""
    python = requirements.provide(function["requirements"])  # the server made it; this finds it
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [python, "-c", DIRECTLY, source]
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
        f"{completion[-60:]!r} for {answer!r}: {ours} through the server, {theirs} directly"
        for (completion, answer), ours, theirs in zip(samples, found, expected, strict=True)
        if ours != theirs
    ]
    assert not different, "\n".join(different)
    assert len({outcome for outcome in expected if outcome[1] is None}) > 1, "the table tells answers apart"


def test_verls_scorers_are_chosen_by_the_data_source_and_give_what_they_give_directly(
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
            through_the_server(server, SAMPLES, data_source=source), directly(function, call, SAMPLES), SAMPLES
        )
    unknown = server.score("#### 72", ground_truth="72", data_source="somewhere/else")
    assert (unknown["valid"], unknown["reason"]) == (False, "exception"), "what raises there is no zero here"
    assert "NotImplementedError" in unknown["message"]
    extras = server.score("Answer: 72", ground_truth="72", data_source="math_dapo")
    assert extras["components"] == {"acc": 1.0}, "the numbers beside a score are components"


def test_verls_scorer_of_batches_scores_the_samples_of_a_group_as_it_does_directly(start_server: StartServer) -> None:
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
    assert_equal([(each.score, each.reason) for each in result.results], directly(function, call, samples), samples)


def test_a_scorer_of_verls_as_a_file_needs_no_package(start_server: StartServer, tmp_path: Path) -> None:
    function = documented("verl")
    python = Path(requirements.provide(function["requirements"]))
    [packaged] = python.parents[1].glob("lib/python*/site-packages/verl/utils/reward_score/gsm8k.py")
    file = tmp_path / "gsm8k.py"
    file.write_bytes(packaged.read_bytes())
    server = start(start_server, {"file": str(file)})
    call = "from verl.utils.reward_score.gsm8k import compute_score as call"
    assert_equal(through_the_server(server, SAMPLES), directly(function, call, SAMPLES), SAMPLES)


@pytest.mark.parametrize(
    ("name", "entrypoint"),
    [
        ("accuracy", "accuracy_reward"),
        ("accuracy", "reasoning_accuracy_reward"),
        ("format", "think_format_reward"),
    ],
)
def test_trls_functions_give_what_they_give_directly_and_their_none_is_an_abstention(
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
    expected = directly(function, call, samples)
    assert_equal(through_the_server(server, samples, prompt=[{"role": "user", "content": "?"}]), expected, samples)
    assert ((None, "abstained") in expected) == (name == "accuracy"), "answers that cannot be read are in the table"


def test_trls_punishment_of_long_completions_needs_their_number_of_tokens_alone(start_server: StartServer) -> None:
    function = documented("length")
    server = start(start_server, function)
    lengths = [0, 1, 895, 896, 897, 960, 1023, 1024, 1025, 100_000]
    call = """
from trl.rewards import get_soft_overlong_punishment
punish = get_soft_overlong_punishment(max_completion_len=1024, soft_punish_cache=128)
def call(completion, answer):
    return punish([[7] * int(answer)])[0]
"""
    found = [server.score("x", extra_info={"num_tokens": num})["score"] for num in lengths]
    assert [(score, None) for score in found] == directly(function, call, [("x", str(num)) for num in lengths])


@pytest.fixture
def without_unbuildable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/coming-from.md tells users of OpenRLHF."""
    exclude = tmp_path / "exclude.txt"
    exclude.write_text(UNBUILDABLE)
    monkeypatch.setenv("UV_EXCLUDE", str(exclude))


@pytest.mark.usefixtures("without_unbuildable")
def test_openrlhfs_grader_gives_what_it_gives_directly(start_server: StartServer) -> None:
    function = documented("openrlhf")
    server = start(start_server, function)
    call = """
from openrlhf.utils import extract_boxed_answer, grade_answer
def call(completion, answer):
    return float(grade_answer(extract_boxed_answer(completion), answer))
"""
    assert_equal(through_the_server(server, SAMPLES), directly(function, call, SAMPLES), SAMPLES)


def test_math_verify_as_people_call_it(start_server: StartServer) -> None:
    source = """
from math_verify import parse, verify
def compute_score(solution_str, ground_truth):
    return float(verify(parse("$" + ground_truth + "$"), parse(solution_str)))
"""
    function = {"inline": source, "requirements": ["math-verify==0.9.0"]}
    call = f"{source}\ndef call(completion, answer):\n    return compute_score(completion, answer)"
    assert_equal(through_the_server(start(start_server, function), SAMPLES), directly(function, call, SAMPLES), SAMPLES)


def test_the_guides_table_of_settings_names_what_the_packages_have(request: pytest.FixtureRequest) -> None:
    table = (
        COMING_FROM.read_text().partition("| here | verl | TRL (`GRPOConfig`) | OpenRLHF |")[2].partition("\n## ")[0]
    )
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    verl, trl, openrlhf = ([name for row in rows for name in re.findall(r"`([^`]+)`", row[i])] for i in (1, 2, 3))
    assert min(len(verl), len(trl), len(openrlhf)) > 25
    assert not sorted(set(verl) - _verls_settings())
    assert not sorted(set(trl) - _trls_settings() - {"model", "trl vllm-serve", "accelerate launch"})
    request.getfixturevalue("without_unbuildable")  # not before: the others' environments are those of the tests above
    assert not sorted(set(openrlhf) - _openrlhfs_settings())


def _site_packages(reward: str) -> Path:
    [folder] = (
        Path(requirements.provide(documented(reward)["requirements"])).parents[1].glob("lib/python*/site-packages")
    )
    return folder


def _verls_settings() -> set[str]:
    file = _site_packages("verl") / "verl/trainer/config/_generated_ppo_trainer.yaml"

    def paths(node: Any, prefix: str) -> set[str]:
        if not isinstance(node, dict):
            return {prefix}
        return {prefix}.union(*(paths(child, f"{prefix}.{key}" if prefix else key) for key, child in node.items()))

    return paths(yaml.safe_load(file.read_text()), "")


def _trls_settings() -> set[str]:
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


def _openrlhfs_settings() -> set[str]:
    text = (_site_packages("openrlhf") / "openrlhf/cli/train_ppo_ray.py").read_text()
    return {name.replace("{prefix}", "actor") for name in re.findall(r'"(--[A-Za-z0-9_.{}]+)"', text)}
