"""Rewards of further projects, unchanged or by docs/adapters.md: in a real server equal to direct calls.

Each is installed from PyPI by `requirements`, without what its scorers do not import (UV_EXCLUDE). slime, EasyR1,
open-instruct and rLLM are not on PyPI: tests/unit/rljob_plugins/test_forms.py and tests/unit/test_docs_adapters.py have
their signatures.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rljob_service.pool import requirements
from tests.support.adapters import ADAPTERS
from tests.support.reward_process import Server
from tests.support.waiting import DEADLINE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.packages]

TORCH = f"torch=={importlib.metadata.version('torch')}"
"""The build that the lock file has installed already."""
MEMORY = {"maxMemory": "64Gi"}
GYM = ["reasoning-gym==0.1.25"]

COMPLETIONS = [
    "72",
    "#### 72",
    "The answer is \\boxed{72}.",
    "<think>48 + 24</think>\n<answer>72</answer>",
    "<think>\n48 + 24\n</think>\n<answer>\n72\n</answer>",
    "<think>48 + 24</think> \\boxed{72}",
    "<answer>48 + 24</answer>",
    "Answer: 71, \\boxed{71}",
    "It is \\boxed{\\frac{144}{2}}",
    "[72]",
    "so so so so so so so so so",
    "1, 2, 3 and 72",
    "",
    "答えは \\boxed{７２} です 🧮",
]
ANSWERS = ["72", "\\frac{1}{3}", "71", "no number"]
PROMPTS: list[Any] = ["48 + 24?", [{"role": "user", "content": "48 + 24?"}]]

DIRECT_CALL = """
import asyncio, contextlib, inspect, io, json, sys
samples, call = json.load(sys.stdin), {}
with contextlib.redirect_stdout(io.StringIO()):
    exec(sys.argv[1], call)
    outcomes = []
    for sample in samples:
        try:
            score = call["call"](**sample)
            score = asyncio.run(score) if inspect.isawaitable(score) else score
            outcomes.append([None if score is None else float(score), None])
        except Exception as error:
            outcomes.append([None, type(error).__name__])
print(json.dumps(outcomes))
"""


class Packaged(NamedTuple):
    """A packaged reward, and the direct call that it must equal."""

    name: str
    function: dict[str, Any]
    call: str
    """Source of `call(prompt, completion, ground_truth, extra_info, prompt_ids, completion_ids) -> number or None`."""
    answers: list[Any] = ANSWERS
    exclude: str = ""
    prompts: list[Any] = PROMPTS
    reads_tokens: bool = False
    installer: dict[str, str] = {}
    """Further variables of uv."""


def trl_factory(name: str, arguments: dict[str, Any], call: str) -> Packaged:
    function = {"module": "trl.rewards", "entrypoint": name, "factoryArgs": arguments, **MEMORY}
    source = f"from trl.rewards import {name}\nreward = {name}(**{arguments!r})\n"
    source += f"def call(prompt, completion, ground_truth, completion_ids, **_):\n    return {call}[0]\n"
    return Packaged(
        name,
        function | {"requirements": ["trl==1.16.0", "math-verify==0.9.0", TORCH]},
        source,
        prompts=PROMPTS[1:],
        reads_tokens=True,
    )


def swift(name: str, **options: Any) -> Packaged:
    function = {"module": "swift.rewards.orm", "entrypoint": name, "factoryArgs": options, **MEMORY}
    source = f"""
from types import SimpleNamespace
from swift.rewards.orm import {name}
reward = {name}(SimpleNamespace(**{options!r}))
def call(completion, ground_truth, completion_ids, **_):
    return reward([completion], solution=[ground_truth], response_token_ids=[completion_ids])[0]
"""
    requires = {"requirements": ["ms-swift==4.6.0", "math-verify==0.9.0", TORCH]}
    return Packaged(f"swift {name}", function | requires, source, reads_tokens=name in ("SoftOverlong", "CosineReward"))


def trinity(module: str, name: str, answers: list[Any] = ANSWERS) -> Packaged:
    load = f"from trinity.common.rewards.{module} import {name}\n"
    source = f"""{load}
reward = {name}()
def call(completion, ground_truth, **_):
    return sum(reward(response=completion, truth=ground_truth).values())
"""
    exclude = "vllm flash-attn megatron-core transformer-engine wandb tensorboard verl torch"
    function = {"inline": load + ADAPTERS["Trinity-RFT"][0].replace("MathRewardFn", name), **MEMORY}
    return Packaged(f"trinity {name}", function | {"requirements": ["trinity-rft==0.6.0"]}, source, answers, exclude)


def gym(dataset: str, answers: list[Any]) -> Packaged:
    """A dataset's scorer, whose entries have a column metadata."""
    adapter = ADAPTERS["reasoning_gym"][0].replace("leg_counting", dataset)
    function = {"inline": f"import reasoning_gym\n{adapter}"}
    source = f"""
import reasoning_gym
score = reasoning_gym.get_score_answer_fn({dataset!r})
def call(completion, ground_truth, extra_info, **_):
    return score(completion, {{"question": "48 + 24?", "answer": ground_truth, "metadata": extra_info["metadata"]}})
"""
    return Packaged(f"gym {dataset}", function | {"requirements": GYM, **MEMORY}, source, answers)


def grids() -> Packaged:
    """A dataset whose metadata have tuples: its entry is that of the row's index."""
    adapter = ADAPTERS["reasoning_gym"][1]
    source = """
import reasoning_gym
dataset = reasoning_gym.create_dataset("arc_agi", seed=1, size=500)
def call(completion, extra_info, **_):
    return dataset.score_answer(completion, dataset[extra_info["index"]])
"""
    function = {"inline": f"import reasoning_gym\n{adapter}", "requirements": GYM, **MEMORY}
    return Packaged("gym arc_agi", function, source)


def areal(module: str) -> Packaged:
    name = f"{module}_reward_fn"
    load = f"from areal.reward.{module} import {name} as reward_fn\n"
    function = {"inline": load + ADAPTERS["AReaL"][0], **MEMORY}
    source = f"""{load}
def call(prompt, completion, ground_truth, extra_info, prompt_ids, completion_ids):
    text = prompt if isinstance(prompt, str) else prompt[0]["content"]
    return reward_fn(text, completion, prompt_ids, completion_ids, ground_truth, **extra_info)
"""
    exclude = "torchaudio torchvision qwen-agent openai-agents claude-agent-sdk litellm openhands langchain "
    return Packaged(
        f"areal {module}",
        function | {"requirements": ["areal==1.0.4", "openai", TORCH]},
        source,
        exclude=exclude + "langchain-openai anthropic matplotlib seaborn",
        reads_tokens=True,
        installer={"UV_PRERELEASE": "allow"},
    )


RUBRIC = """
import verifiers as vf
parser = vf.XMLParser(["answer"], answer_field="answer")
def exact(parser, completion, answer, **kwargs):
    return float(parser.parse_answer(completion) == answer)
async def short(completion, state, info):
    return 1.0 / (1 + len(completion[-1]["content"]) + info["level"])
rubric = vf.RubricGroup([
    vf.Rubric(funcs=[exact, short, parser.get_format_reward_func()], weights=[1.0, 0.5, 0.2], parser=parser),
    vf.MathRubric(),
])
"""
RUBRIC_CALL = f"""{RUBRIC}
async def call(prompt, completion, ground_truth, extra_info, **_):
    reply = [{{"role": "assistant", "content": completion}}]
    row = {{"prompt": prompt, "answer": ground_truth, "info": extra_info}}
    score = 0.0
    for member in rubric.rubrics:
        state = vf.State(input=row, completion=reply, trajectory=[], timing=vf.types.RolloutTiming())
        await member.score_rollout(state)
        score += state["reward"]
    return score
"""
TASK = """
import verifiers.v1 as vf
class SumData(vf.TaskData):
    answer: str
    level: int
class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)
    @vf.reward
    async def keyed(self, task, trace) -> dict:
        return {"turns": trace.num_turns, "level": task.level / 10}
    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_reply)
"""
TASK_CALL = f"""{TASK}
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import AssistantMessage, UserMessage
async def call(completion, ground_truth, extra_info, **_):
    task = SumTask(SumData(prompt="48 + 24?", answer=ground_truth, level=extra_info["level"]))
    nodes = [MessageNode(message=UserMessage(content="48 + 24?"))]
    nodes.append(MessageNode(message=AssistantMessage(content=completion), parent=0, sampled=True))
    described = TraceTask(type="SumTask", data=task.data)
    trace = Trace(task=described, agent=AgentInfo(config=vf.AgentConfig()), nodes=nodes)
    await task.score(trace)
    return trace.reward
"""
COUNTDOWN = [json.dumps({"target": target, "numbers": numbers}) for target, numbers in ((72, [48, 24]), (3, [1, 2]))]

DAPO_BUFFER = {"enable": True, "len": 8, "penalty_factor": 0.5, "log": True}
MANAGER = """
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.utils.reward_score import math_dapo
def score(data_source, solution_str, ground_truth, extra_info=None):
    return math_dapo.compute_score(solution_str, ground_truth)
class Manager(DAPORewardManager): ...
"""
MANAGER_CALL = """
from verl.utils.reward_score.math_dapo import compute_score
def call(completion, ground_truth, completion_ids, **_):
    exceeded = len(completion_ids) - (24 - 8)
    return compute_score(completion, ground_truth)["score"] + min(-exceeded / 8 * 0.5, 0)
"""

PACKAGED = [
    Packaged(
        "verl DAPORewardManager",
        {
            "inline": MANAGER,
            "entrypoint": "Manager",
            "factoryArgs": {
                "compute_score": "score",
                "reward_kwargs": {"max_resp_len": 24, "overlong_buffer_cfg": DAPO_BUFFER},
            },
            "requirements": ["verl==0.9.1", TORCH],
            **MEMORY,
        },
        MANAGER_CALL,
        reads_tokens=True,
    ),
    trl_factory(
        "get_cosine_scaled_reward",
        {"max_len": 40, "min_value_wrong": -2.0},
        'reward(completions=[[{"role": "assistant", "content": completion}]], solution=[ground_truth], '
        "completion_ids=[completion_ids])",
    ),
    trl_factory(
        "get_repetition_penalty_reward",
        {"ngram_size": 2, "max_penalty": -1.5},
        "reward(completion_ids=[completion_ids])",
    ),
    trl_factory(
        "get_soft_overlong_punishment",
        {"max_completion_len": 24, "soft_punish_cache": 8},
        "reward(completion_ids=[completion_ids])",
    ),
    swift("MathAccuracy"),
    swift("Format"),
    swift("RepetitionPenalty", repetition_n_grams=2, repetition_max_penalty=-1.0),
    swift("SoftOverlong", soft_max_length=24, soft_cache_length=8),
    swift(
        "CosineReward",
        cosine_min_len_value_wrong=-1.0,
        cosine_max_len_value_wrong=-0.5,
        cosine_min_len_value_correct=1.0,
        cosine_max_len_value_correct=0.5,
        cosine_max_len=40,
    ),
    trinity("math_reward", "MathRewardFn"),
    trinity("math_reward", "MathBoxedRewardFn"),
    trinity("countdown_reward", "CountDownRewardFn", COUNTDOWN),
    areal("gsm8k"),
    areal("clevr_count_70k"),
    areal("geometry3k"),
    gym("leg_counting", ["72", "71"]),
    gym("simple_equations", ["72", "7"]),
    grids(),
    Packaged(
        "verifiers Rubric",
        {"inline": RUBRIC, "requirements": ["verifiers==0.1.14"], **MEMORY},
        RUBRIC_CALL,
        prompts=PROMPTS[1:],
    ),
    Packaged(
        "verifiers Task",
        {"inline": TASK, "entrypoint": "SumTask", "requirements": ["verifiers==0.4.0"], **MEMORY},
        TASK_CALL,
    ),
]


def build_samples(packaged: Packaged) -> list[dict[str, Any]]:
    """Return a sample for each prompt, completion and answer. A token is a character."""
    cases = itertools.product(packaged.prompts, COMPLETIONS, packaged.answers)
    return [
        {
            "prompt": prompt,
            "completion": completion,
            "ground_truth": answer,
            "extra_info": {"index": number, "level": number % 7, "metadata": {"difficulty": {}}},
            "prompt_ids": [1, 2, 3],
            "completion_ids": [ord(character) for character in completion],
        }
        for number, (prompt, completion, answer) in enumerate(cases)
    ]


@pytest.fixture
def set_up_installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Packaged], None]:
    def write(packaged: Packaged) -> None:
        for variable, lines in (("UV_EXCLUDE", packaged.exclude.split()), ("UV_OVERRIDE", [TORCH])):
            file = tmp_path / variable
            file.write_text("".join(f"{line}\n" for line in lines))
            monkeypatch.setenv(variable, str(file))
        for variable, value in packaged.installer.items():
            monkeypatch.setenv(variable, value)

    return write


def score_directly(packaged: Packaged, samples: list[dict[str, Any]]) -> list[list[Any]]:
    """Return [score, name of the exception] of each sample, in the interpreter with the reward's packages."""
    python = requirements.ensure_environment(packaged.function["requirements"])  # the server has created it
    command = [python, "-W", "ignore", "-c", DIRECT_CALL, packaged.call]
    done = subprocess.run(
        command, input=json.dumps(samples), env=os.environ, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    outcomes: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


@pytest.mark.parametrize("packaged", PACKAGED, ids=lambda packaged: packaged.name)
def test_packaged_reward_equals_direct_calls(
    packaged: Packaged, start_server: Callable[..., Server], set_up_installer: Callable[[Packaged], None]
) -> None:
    set_up_installer(packaged)
    server = start_server(None, function=packaged.function, slots=1, timeoutSeconds=DEADLINE_SECONDS)
    samples = build_samples(packaged)
    results = [server.score(**sample) for sample in samples]
    found = [
        [
            result["score"],
            result["message"].rpartition(": ")[0].split(": ")[-1] if result["reason"] == "exception" else None,
        ]
        for result in results
    ]
    expected = score_directly(packaged, samples)
    different = [
        (sample["completion"], sample["ground_truth"], result, direct)
        for sample, result, actual, direct in zip(samples, results, found, expected, strict=True)
        if actual[0] != direct[0]
    ]
    assert not different, different[:3]
    assert len({score for score, _ in expected}) > 1, "the samples must have different scores"
    assert ("tokens" in server.request("GET", "/v1/info")[1]["reads"]) == packaged.reads_tokens
