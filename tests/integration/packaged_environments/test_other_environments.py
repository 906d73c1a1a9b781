"""Environments of other projects, unchanged, through a real runner: the same rewards as in the project's loop.

Each is installed from PyPI by environment.packages. The project's loop runs in the same virtual environment, and asks
the same scripted model.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rljob_api.manifest.services.runner import Environment, Runner
from rljob_api.wire.contract import READ_ROWS
from rljob_service.pool import requirements
from tests.support.reward_process import Server
from tests.support.scripted_model import ScriptedModel
from tests.support.waiting import DEADLINE_SECONDS, wait_for

pytestmark = pytest.mark.slow

MAX_TURNS = 6
TORCH = f"torch=={importlib.metadata.version('torch')}"
"""The build that the lock file has installed already."""

OWN_LOOP = """
import contextlib, io, json, os, sys
rows, own = json.load(sys.stdin), {}
with contextlib.redirect_stdout(io.StringIO()):
    exec(sys.argv[1], own)
    totals = [own["play"](**row) for row in rows]
print(json.dumps(totals))
"""


class Row(NamedTuple):
    """A row of the job, and what the policy answers."""

    answers: list[str | dict[str, Any]]
    ground_truth: Any = None
    columns: dict[str, Any] = {}


class Case(NamedTuple):
    name: str
    environment: dict[str, Any]
    """agent.environment."""
    rows: list[Row]
    play: str
    """Source of `play(answers, ground_truth, columns, url, key) -> sum of all rewards`, the project's own loop."""
    source: str | None = None
    """agent.runner.function.inline."""
    own_packages: list[str] = []
    """Packages of the project's loop, where they differ from those of the runner."""
    exclude: str = ""
    """Requirements of these that the loop does not import."""
    own_rows: dict[str, list[dict[str, Any]]] = {}
    """By split, columns of the first rows that env:// sources get; empty: it has no rows."""


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "call-1", "type": "function", "function": function}]}


def skyrl(name: str, rows: list[Row]) -> Case:
    play = f"""
import skyrl_gym
def play(answers, ground_truth, columns, **_):
    truth = {{"method": "rule", "ground_truth": ground_truth}}
    extras = {{"reward_spec": truth, "reward_model": truth, "max_turns": {MAX_TURNS}, **columns}}
    env, total = skyrl_gym.make({name!r}, env_config={{}}, extras=extras), 0.0
    env.init([{{"role": "user", "content": "48 + 24?"}}])
    for answer in answers:
        out = env.step(answer)
        total += out["reward"]
        if out["done"]:
            break
    env.close()
    return total
"""
    return Case(f"skyrlGym {name}", {"framework": "skyrlGym", "id": name, "packages": ["skyrl-gym==0.4.0"]}, rows, play)


def toy_text(name: str, labels: list[str], rows: list[Row], **args: Any) -> Case:
    play = f"""
import gymnasium
def play(answers, columns, **_):
    env, total = gymnasium.make({name!r}, **{args!r}), 0.0
    env.reset(seed=columns["seed"])
    for answer in answers:
        _, reward, terminated, truncated, _ = env.step({labels!r}.index(answer))
        total += float(reward)
        if terminated or truncated:
            break
    env.close()
    return total
"""
    environment = {"id": name, "args": {**args, "rljob": {"labels": labels}}, "packages": ["gymnasium==1.4.0"]}
    return Case(f"gymnasium {name}", {"framework": "gymnasium", **environment}, rows, play)


TASKSET = """
import verifiers.v1 as vf

class SquareData(vf.TaskData):
    answer: str

class SquareTask(vf.Task[SquareData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def short(self, trace) -> float:
        return 1.0 / len(trace.last_reply)

class Squares(vf.Taskset[SquareTask]):
    def load(self):
        for i in range(4):
            yield SquareTask(SquareData(prompt=f"Square {i}.", answer=str(i * i)), self.config.task)

__all__ = ["Squares"]
"""
V1_LOOP = f"""
import json, os, pathlib, subprocess, sys, tempfile
folder = tempfile.mkdtemp()
pathlib.Path(folder, "squares.py").write_text({TASKSET!r})
def play(columns, url, key, **_):
    out = tempfile.mkdtemp(dir=folder)
    options = f'''squares --model policy --client.base-url {{url}}/v1 --client.api-key-var KEY --output-dir {{out}}
        --env.agent.harness.id null --env.agent.runtime.type subprocess
        --select.include.idx {{columns["index"]}} -n 1 -r 1'''.split()
    env = {{**os.environ, "KEY": key, "PYTHONPATH": folder}}
    command = [os.path.join(os.path.dirname(sys.executable), "vf-eval"), *options]
    subprocess.run(command, env=env, check=True, capture_output=True)
    episode = json.loads(next(pathlib.Path(out).rglob("traces.jsonl")).read_text())
    rewards = episode["traces"][0]["rewards"].values()
    return sum(each["score"] * each["weight"] for each in rewards)
"""

DUEL = """
import verifiers.v1 as vf

class DuelTask(vf.Task[vf.TaskData]):
    pass

class DuelConfig(vf.EnvConfig):
    high: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    low: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    judge: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})

class Duel(vf.Env[DuelConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        said = {}
        def seat(name):
            return vf.Task(vf.TaskData(idx=task.data.idx, prompt=None, system_prompt=f"You are {name}."))
        async with (
            agents.high.interaction(seat("high")) as high,
            agents.low.interaction(seat("low")) as low,
        ):
            for name, player in (("high", high), ("low", low)):
                said[name] = int((await player.turn("A number?")).last_reply)
        verdict = await agents.judge.run(vf.Task(vf.TaskData(idx=task.data.idx, prompt=f"{said}. Points?")))
        points = float(verdict.last_reply) * (1 if said["high"] > said["low"] else -1)
        high.trace.record_reward("points", points)
        low.trace.record_reward("points", -points)

class Duels(vf.Taskset[DuelTask]):
    def load(self):
        return [DuelTask(vf.TaskData(idx=i, prompt=None)) for i in range(2)]

__all__ = ["Duel", "Duels"]
"""
"""An environment with two seats that train and one that does not."""


CASES = [
    skyrl("gsm8k", [Row(["#### 72"], "72"), Row(["72"], "72")]),
    skyrl("gsm8k_multi_turn", [Row(["hm", "#### 71", "#### 72"], "72"), Row(["#### 1"] * MAX_TURNS, "72")]),
    skyrl("aime", [Row(["Answer: 72"], "72"), Row(["Answer: 71"], "72")]),
    toy_text(
        "FrozenLake-v1",
        ["left", "down", "right", "up"],
        [
            Row(["down", "down", "right", "right", "down", "right"], None, {"seed": 1}),
            Row(["right", "down"], None, {"seed": 1}),
        ],
        render_mode="ansi",
        is_slippery=False,
    ),
    toy_text(
        "CliffWalking-v1",
        ["up", "right", "down", "left"],
        [Row(["right", "up", "right"], None, {"seed": 3}), Row(["up", "left"], None, {"seed": 3})],
    ),
    toy_text("Blackjack-v1", ["stick", "hit"], [Row(["stick"], None, {"seed": seed}) for seed in range(6)]),
    Case(
        "verifiers 0.4 Taskset",
        {"framework": "verifiers", "packages": ["verifiers==0.4.0"]},
        [Row(["4"], None, {"index": 2}), Row(["It is 9"], None, {"index": 3})],
        V1_LOOP,
        source=TASKSET,
        own_rows={
            "train": [{"index": n, "prompt": f"Square {n}.", "answer": str(n * n)} for n in range(4)],
            "eval": [],
        },
    ),
]


def start_runner(start_server: Callable[..., Server], environment: dict[str, Any], source: str | None) -> Server:
    """Start the server that an operator would start for this agent."""
    function = None if source is None else {"inline": source, "maxMemory": "64Gi"}
    runner = Runner.model_validate({"function": function, "slots": 1})
    service = runner.build_service(Environment.model_validate(environment))
    assert service.function is not None
    return start_server(
        None,
        ["--serves", "episodes", "--framework", environment["framework"]],
        function=service.function.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        slots=1,
        timeoutSeconds=DEADLINE_SECONDS,
    )


def play_episode(server: Server, model: ScriptedModel, row: Row) -> dict[str, Any]:
    """Return the EpisodeReply."""
    arguments = {
        "episode": "e-1",
        "attempt": 0,
        "model": {"url": model.url, "api_key": model.script(row.answers)},
        "prompt": [{"role": "user", "content": "48 + 24?"}],
        "ground_truth": row.ground_truth,
        "extra_info": {"index": 0, "split": "train", **row.columns},
        "seed": 7,
        "max_turns": MAX_TURNS,
        "deadline_seconds": DEADLINE_SECONDS,
    }
    result = server.call(arguments)
    assert result["reason"] is None, result["message"]
    reply: dict[str, Any] = result["value"]
    return reply


def play_own_loop(case: Case, model: ScriptedModel, packages: list[str]) -> list[float]:
    """Return the total of each row in the project's own loop."""
    python = requirements.ensure_environment(packages)  # the runner has created it
    rows = [{**row._asdict(), "url": model.url, "key": model.script(row.answers)} for row in case.rows]
    command = [python, "-W", "ignore", "-c", OWN_LOOP, case.play]
    done = subprocess.run(
        command, input=json.dumps(rows), env=os.environ, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    totals: list[float] = json.loads(done.stdout.splitlines()[-1])
    return totals


def total_of(reply: dict[str, Any]) -> float:
    rewards = [reply["reward"], *reply["rewards"].values()]
    return float(sum(reward for reward in rewards if reward is not None))


def describe_case(case: Case) -> Any:
    """verifiers alone takes longer to install and to import than all others: minutes on two cores."""
    marks = [pytest.mark.packages] if case.name.startswith("verifiers") else []
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [describe_case(case) for case in CASES])
def test_environment_scores_as_in_its_own_loop(
    case: Case, start_server: Callable[..., Server], scripted_model: ScriptedModel
) -> None:
    server = start_runner(start_server, case.environment, case.source)
    found = [total_of(play_episode(server, scripted_model, row)) for row in case.rows]
    expected = play_own_loop(case, scripted_model, case.environment["packages"])
    assert found == pytest.approx(expected), "the rewards of the project's own loop"
    assert len(set(expected)) > 1, "the rows must have different rewards"
    for split, rows in case.own_rows.items():
        result = server.call({"split": split, "start": 0, "count": 10}, function=READ_ROWS)
        assert (result["reason"] is None) == bool(rows), result["message"]
        own = result["value"]["rows"] if rows else []
        assert all(isinstance(row["prompt"], str | list) and row["prompt"] for row in own)
        assert [{name: row[name] for name in columns} for row, columns in zip(own, rows, strict=False)] == rows


@pytest.fixture(scope="module")
def echo_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment that `openenv init` writes."""
    python = requirements.ensure_environment(["openenv==0.10.0"])
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([python, "-m", "openenv.cli", "init", "echo_env"], cwd=folder, check=True, capture_output=True)
    return folder / "echo_env"


ECHO_LOOP = """
from echo_env.models import EchoAction
from echo_env.server.echo_env_environment import EchoEnvironment
def play(answers, **_):
    env = EchoEnvironment()
    env.reset(seed=0)
    total = sum(env.step(EchoAction(message=answer)).reward for answer in answers)
    env.close()
    return total
"""


def accepts_connections(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


@pytest.mark.packages
@pytest.mark.parametrize("form", ["class", "client"])
def test_openenv_environment_scores_as_in_its_own_loop(
    form: str, echo_package: Path, start_server: Callable[..., Server], scripted_model: ScriptedModel
) -> None:
    packages = ["openenv==0.10.0", f"openenv-echo_env @ file://{echo_package}"]
    rows = [Row(["Hello", "a longer message"]), Row(["Hi"])]
    case = Case("openenv", {"framework": "openenv", "packages": packages}, rows, ECHO_LOOP)
    python = requirements.ensure_environment(packages)
    process = None
    if form == "class":
        environment = {"id": "echo_env.server.echo_env_environment:EchoEnvironment"}
    else:
        process = subprocess.Popen([python, "-m", "echo_env.server.app", "--port", "8765"], stderr=sys.stderr)
        wait_for(lambda: accepts_connections("127.0.0.1", 8765), "the environment's server")
        environment = {"id": "echo_env.client:EchoEnv", "args": {"base_url": "http://127.0.0.1:8765"}}
    try:
        server = start_runner(start_server, {**case.environment, **environment}, None)
        found = [total_of(play_episode(server, scripted_model, row)) for row in rows]
    finally:
        if process is not None:
            process.terminate()
            process.wait(DEADLINE_SECONDS)
    assert found == pytest.approx(play_own_loop(case, scripted_model, packages))


COUNTER = """
class Counter:
    def __init__(self, goal=4):
        self.goal, self.count = goal, 0

    def reset(self, start=0, **row):
        self.count = start
        return f" Begin with {start}."

    def add(self, amount: int) -> str:
        '''Add to the counter.

        Args:
            amount: How much.
        '''
        if amount < 0:
            raise ValueError("negative")
        self.count += amount
        return f"now {self.count}"

    def get_reward(self) -> float:
        return 1.0 - abs(self.goal - self.count) / 10
"""
TRL_LOOP = f"""
import copy, json, types
from trl.trainer import grpo_trainer
{COUNTER}
def play(answers, columns, **_):
    environment = Counter()
    environment.reset(**columns)
    parts = [{{"content": each}} if isinstance(each, str) else copy.deepcopy(each) for each in answers]
    messages = [{{"role": "assistant", **each}} for each in parts]
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    turns = iter(range(1, len(messages)))
    grpo_trainer.parse_response = lambda tokenizer, ids, **_: messages[ids[0]]
    trainer = types.SimpleNamespace(
        _sync_tool_dicts=[{{"add": environment.add}}], _async_tool_dicts=[{{}}], max_tool_calling_iterations=99,
        use_vllm=False, _is_vlm=False, max_completion_length=10**6, environment_factories=None, tools=[],
        model=types.SimpleNamespace(config=types.SimpleNamespace(max_position_embeddings=10**6)), _tokenizer=None,
        _get_tool_suffix_ids=lambda messages: [0],
        _generate_single_turn=lambda *args, **kwargs: ([[next(turns)]], None),
    )
    prompt = [{{"role": "user", "content": "?"}}]
    grpo_trainer.GRPOTrainer._tool_call_loop(trainer, [prompt], [[0]], [[0]], [[messages[0]]], None, None, {{}})
    return environment.get_reward()
"""


AGENT = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.tries = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.tries += 1
        right = states["action_text"] == states["label"]
        reward = torch.tensor([1.0 if right else -0.1 * self.tries])
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "Again.",
            "done": right or self.tries == 3,
            "extra_logs": {"characters": torch.tensor(len(states["observation_text"]))},
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
OPENRLHF_LOOP = f"""
import asyncio, importlib.util, logging, pathlib, sys, types
import torch

def load(name, path=None):
    spec = importlib.util.spec_from_file_location(name, path) if path else None
    module = sys.modules[name] = importlib.util.module_from_spec(spec) if spec else types.ModuleType(name)
    if spec:
        spec.loader.exec_module(module)
    return module

root = pathlib.Path(importlib.util.find_spec("openrlhf").origin).parent
load("openrlhf.utils")  # in the place of a package that imports a GPU stack
load("openrlhf.utils.logging_utils").init_logger = logging.getLogger
load("openrlhf.utils.agent", root / "utils" / "agent.py")
{AGENT}
def play(answers, ground_truth, **_):
    texts = iter(answers)

    class Engine:
        async def generate(self, tokens, params, **kwargs):
            text = next(texts)
            ids = [ord(c) for c in text]
            out = types.SimpleNamespace(token_ids=ids, text=text, finish_reason="stop", logprobs=None)
            return types.SimpleNamespace(outputs=[out])

    def tokenizer(text, **_):
        return {{"input_ids": torch.tensor([[ord(c) for c in text]])}}

    params = types.SimpleNamespace(max_tokens=None, logprobs=None)
    play = AgentExecutor().execute("48 + 24?", ground_truth, params, 4096, tokenizer, Engine())
    return float(asyncio.run(play)["reward"])
"""

HEAVY_CASES = [
    Case(
        "trl",
        {"framework": "trl"},
        [
            Row([call("add", amount=2), call("add", amount=-1), call("run"), "done"], None, {"start": 1}),
            Row(["done"], None, {"start": 1}),
        ],
        TRL_LOOP,
        source=COUNTER,
        own_packages=["trl==1.16.0", TORCH],
    ),
    Case(
        "openrlhf",
        {"framework": "openrlhf", "packages": [TORCH, "numpy"]},
        [Row(["71", "72"], "72"), Row(["1", "2", "3"], "72")],
        OPENRLHF_LOOP,
        source=AGENT,
        own_packages=["openrlhf==0.11.2", TORCH, "numpy"],
        exclude="accelerate bitsandbytes datasets deepspeed einops flash-attn grpcio huggingface-hub isort jsonlines "
        "loralib optimum optree peft pylatexenc pynvml ray sympy tensorboard torchdata torchmetrics tqdm transformers "
        "transformers-stream-generator wandb wheel",
    ),
]


@pytest.mark.packages
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in HEAVY_CASES])
def test_environment_scores_as_in_a_loop_with_torch(
    case: Case,
    start_server: Callable[..., Server],
    scripted_model: ScriptedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = start_runner(start_server, case.environment, case.source)
    found = [total_of(play_episode(server, scripted_model, row)) for row in case.rows]
    for variable, lines in (("UV_EXCLUDE", case.exclude.split()), ("UV_OVERRIDE", [TORCH])):
        file = tmp_path / variable
        file.write_text("".join(f"{line}\n" for line in lines))
        monkeypatch.setenv(variable, str(file))
    expected = play_own_loop(case, scripted_model, case.own_packages)
    assert found == pytest.approx(expected), "the rewards of the project's loop"
    assert len(set(expected)) > 1, "the rows must have different rewards"


@pytest.mark.packages
def test_agents_of_verifiers_are_seats_with_their_own_rewards(
    start_server: Callable[..., Server], scripted_model: ScriptedModel, tmp_path: Path
) -> None:
    """As kuhn_poker of its repository: both players are the policy, and their rewards add up to 0."""
    package = tmp_path / "duels"
    (package / "duels").mkdir(parents=True)
    (package / "duels" / "__init__.py").write_text(DUEL)
    (package / "pyproject.toml").write_text(
        '[project]\nname = "duels"\nversion = "1.0"\n[build-system]\nrequires = ["hatchling"]\n'
        'build-backend = "hatchling.build"\n'
    )
    environment = {
        "framework": "verifiers",
        "id": "duels",
        "packages": ["verifiers==0.4.0", f"duels @ {package.as_uri()}"],
    }
    server = start_runner(start_server, environment, None)
    reply = play_episode(server, scripted_model, Row(["7", "3", "2"], None, {"index": 1}))
    found = {seat["seat"]: (seat["reward"], seat["baseline"]) for seat in reply["seats"]}
    assert found == {"high": (2.0, "group"), "low": (-2.0, "group")}, "the judge does not train"
    assert len({seat["session"] for seat in reply["seats"]}) == 2
    assert reply["reward"] is None
