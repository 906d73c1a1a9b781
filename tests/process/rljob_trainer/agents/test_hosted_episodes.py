"""Episodes through the real gateway and a real runner's server: each program's process ends with its episode."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rljob_api.manifest.agent import Agent
from rljob_api.manifest.job_spec import Service
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask
from rljob_trainer.agents.hosted import HostedLoop
from rljob_trainer.calls.client import AgentServices
from rljob_trainer.episodes.types import Episode, EpisodeEnd
from rljob_trainer.gateway.server import ModelGateway
from rljob_trainer.replicas.http import open_session
from tests.support.chat_templates import build_template
from tests.support.episodes import listed
from tests.support.gateways import SpelledPolicy
from tests.support.reward_process import TOKEN, Server
from tests.support.reward_servers import start_server
from tests.support.waiting import DEADLINE_SECONDS

__all__ = ["start_server"]  # a fixture

PROGRAM = """
import os, time
from openai import OpenAI

def run(messages, kind, attempt):
    client = OpenAI()

    def ask(*added):
        completion = client.chat.completions.create(model="policy", messages=[*messages, *added])
        return completion.id, completion.choices[0].message

    if kind == "silent":
        return 1.0
    first, message = ask()
    if kind == "raise" or (kind == "die once" and attempt == 0):
        os._exit(3) if kind == "die once" else [][1]
    if kind == "hang":
        print(os.getpid(), flush=True)
        time.sleep(1000)
    if kind == "null":
        return None
    _, again = ask(message, {"role": "user", "content": "Again."})
    if kind == "on and on":
        ask(message, {"role": "user", "content": "Once more."})
    return {"reward": 1.0, "rewards": {first: 0.5}, "state": {"pid": os.getpid()}, "info": {"attempt": attempt}}
"""


SHARED_PROGRAM = """
import asyncio, os
from openai import AsyncOpenAI

playing = []

async def run(messages, kind, attempt):
    playing.append(kind)
    if kind == "die":
        while len(playing) < 3:
            await asyncio.sleep(0.01)
        os._exit(3)
    if attempt == 0:
        await asyncio.sleep(1000)
    async with AsyncOpenAI() as client:
        completion = await client.chat.completions.create(model="policy", messages=messages)
    return {"reward": 1.0, "state": {"pid": os.getpid()}, "info": {"attempt": attempt}}
"""


@dataclass(frozen=True)
class Players:
    """Plays episodes of PROGRAM."""

    server: Server
    agent: Agent
    gateway: ModelGateway
    services: AgentServices

    async def play(self, kind: str, policy: Any, **fields: Any) -> Episode:
        agent = self.agent.model_copy(update=fields)
        loop = HostedLoop(agent, self.gateway, self.services)
        prompt = Prompt(7, [{"role": "user", "content": "2 + 2?"}], [1, 2], "4", "sums", {"kind": kind})
        [episode] = await loop.run(EpisodeTask(f"g/train/1/5/{kind}", "train", prompt, 5, 2, policy, needs_reward=True))
        return episode

    def processes(self) -> set[int]:
        return {child.pid for child in self.server.children()}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server(PROGRAM, ["--serves", "episodes"], slots=2)


@pytest.fixture
async def players(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Players]:
    runner = {"function": {"inline": PROGRAM}, "slots": 2, "retries": 1}
    async with open_players(server, runner, tmp_path, monkeypatch) as players:
        yield players


@asynccontextmanager
async def open_players(
    server: Server, runner: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Players]:
    monkeypatch.setenv("RLJOB_HOSTS_FILE", str(tmp_path / "hosts"))
    list_server(server)
    monkeypatch.setenv("RLJOB_TOKEN", TOKEN)
    monkeypatch.setenv("RLJOB_REWARD_SERVICES", json.dumps({"runner": "runner"}))
    agent = Agent.model_validate({"type": "program", "runner": runner, "maxAssistantTurns": 2})
    settings = agent.runner_settings
    assert settings is not None
    gateway = ModelGateway(agent, build_template("qwen25"), None)
    await gateway.start("127.0.0.1", 0)
    try:
        async with open_session() as session:
            services = AgentServices([Service("runner", "spec.agent.runner", settings)], session)
            await services.start()
            yield Players(server, agent, gateway, services)
            await services.close()
    finally:
        await gateway.close()


async def test_program_plays_an_episode_with_exact_tokens(players: Players) -> None:
    policy = SpelledPolicy("It is 3.", "It is 4.")
    episode = await players.play("", policy)
    assert (episode.end, episode.failure, episode.own_reward) == (EpisodeEnd.RETURNED, None, 1.0)
    assert [(turn.text, turn.reward) for turn in episode.turns] == [("It is 3.", 0.5), ("It is 4.", None)]
    [segment] = listed(episode.segments)
    for number, completion in enumerate(policy.completions):
        places = [index for index, turn in enumerate(segment.turns) if turn == number]
        assert [segment.token_ids[index] for index in places] == completion.token_ids
        assert segment.token_ids[: places[0]] == policy.prompts[number]
    assert episode.state["pid"] in players.processes(), "the next episode gets the same process"


@pytest.mark.parametrize(
    ("kind", "reason", "message", "num_turns"),
    [
        ("raise", "exception", "IndexError", 1),
        ("silent", "no_turns", "the program ended without an answer of the model", 0),
        ("null", "abstained", "the program gave no reward", 1),
        ("on and on", "exception", "the gateway had refused a request: the episode has reached spec.agent.maxAssis", 2),
    ],
)
async def test_failed_episode_has_a_reason(
    players: Players, kind: str, reason: str, message: str, num_turns: int
) -> None:
    episode = await players.play(kind, SpelledPolicy(*"abcdefgh"))
    assert episode.failure is not None
    assert (episode.end, episode.failure.reason, episode.failure.path) == (
        EpisodeEnd.FAILED, reason, "spec.agent.runner",
    )  # fmt: skip
    assert message in episode.failure.message
    assert len(episode.turns) == num_turns, "of the last attempt"


async def test_process_that_dies_is_another_attempt(players: Players) -> None:
    episode = await players.play("die once", SpelledPolicy("lost", "a", "b"))
    assert ([turn.text for turn in episode.turns], episode.info) == (["a", "b"], {"attempt": 1})


async def test_episode_at_its_deadline_ends_its_process_and_others_continue(players: Players) -> None:
    before = players.processes()
    hangs, plays = await asyncio.gather(
        players.play("hang", SpelledPolicy("a"), episode_seconds=1.0), players.play("", SpelledPolicy("a", "b"))
    )
    assert (hangs.failure and hangs.failure.path, plays.failure) == ("spec.agent.episodeSeconds", None)
    assert hangs.failure is not None
    assert hangs.failure.message == "the episode took more than 1 s, while it computes since its turn 1"
    await until(lambda: len(before - players.processes()) == 1)


async def test_cancelled_episode_ends_its_process(players: Players) -> None:
    before, policy = players.processes(), SpelledPolicy("a")
    task = asyncio.create_task(players.play("hang", policy))
    await until(lambda: policy.completions and players.services.describe_wait())
    assert players.services.describe_wait().startswith("1 episode in the runner, oldest ")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: len(before - players.processes()) == 1)
    assert players.gateway.statistics()["episodes"] == 0


async def test_server_that_is_killed_during_an_episode_is_another_attempt_elsewhere(
    players: Players, start_server: Callable[..., Server]
) -> None:
    other = start_server(PROGRAM, ["--serves", "episodes"], slots=2)
    list_server(other)
    fleet = players.services.clients["runner"].replicas.fleet
    await until(lambda: set(fleet.replicas) == {other.host})
    policy = SpelledPolicy("lost", "a", "b")
    policy.may_answer.clear()
    task = asyncio.create_task(players.play("", policy))
    await until(lambda: policy.prompts)
    psutil.Process(other.pid).kill()
    list_server(players.server)
    await until(lambda: len(policy.prompts) > 1)
    policy.may_answer.set()
    episode = await task
    assert [turn.text for turn in episode.turns] == ["a", "b"], "of the attempt that the other server played"
    assert episode.info["attempt"] >= 1, "each request is one, also to a server that does not answer"


def list_server(server: Server) -> None:
    """Make a server the only replica of the runner."""
    Path(os.environ["RLJOB_HOSTS_FILE"]).write_text(f"{server.host} runner\n")


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 - any condition, not one that sets an event
            await asyncio.sleep(0.02)


async def test_episode_that_ends_its_process_costs_others_no_attempt(
    start_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(SHARED_PROGRAM, ["--serves", "episodes"], slots=4, episodesPerProcess=4)
    runner = {"function": {"inline": SHARED_PROGRAM}, "slots": 4, "episodesPerProcess": 4, "retries": 0}
    async with open_players(server, runner, tmp_path, monkeypatch) as players:
        played = [players.play(kind, SpelledPolicy(f"It is {kind}.")) for kind in ("die", "left", "right")]
        dead, *others = await asyncio.gather(*played)
    assert dead.failure is not None
    assert (dead.failure.reason, dead.end) == ("worker_died", EpisodeEnd.FAILED)
    assert [(each.failure, each.info["attempt"]) for each in others] == [(None, 1)] * 2, "they started again"
    assert [each.turns[0].text for each in others] == ["It is left.", "It is right."], "each called with its own key"
    assert others[0].state["pid"] == others[1].state["pid"]
