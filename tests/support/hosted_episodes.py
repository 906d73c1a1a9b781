"""A gateway and a runner without servers: programs are coroutines that call the policy of their attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rljob_api.manifest.agent import Agent
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import CallRequest, CallResult, EpisodeCall, ModelAccess
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask, Recording
from rljob_trainer.agents.hosted import HostedLoop
from rljob_trainer.episodes.types import Episode, Turn, empty_segment
from tests.support import seconds

MESSAGES = [{"role": "user", "content": "2 + 2?"}]


def make_program(**fields: Any) -> Agent:
    runner = {"function": {"inline": "x"}, **fields.pop("runner", {})}
    return seconds.validate(Agent, {"type": "program", "runner": runner, **fields})


@dataclass
class FakeEpisode:
    """Implements agents.base.OpenEpisode."""

    task: EpisodeTask
    recording: Recording = field(default_factory=Recording)
    num_attempts: int = 0
    num_closed: int = 0
    num_ended: int = 0

    def start_attempt(self) -> tuple[int, ModelAccess]:
        self.recording = Recording()
        self.num_attempts += 1
        attempt = self.num_attempts - 1
        return attempt, ModelAccess(url="http://gateway", api_key=f"key-{attempt}")

    def end_attempt(self) -> None:
        self.num_ended += 1

    def read(self) -> Recording:
        assert not self.num_closed, "nothing is read from an episode that has ended"
        return self.recording

    def close(self) -> None:
        self.num_closed += 1

    async def answer(self) -> str:
        """Sample an answer, and return its id."""
        recording = self.recording
        recording.waits_for = "waited for a completion"
        completion = await self.task.generate([1, 2, 3])
        if not recording.segments:
            recording.segments.append(empty_segment())
        recording.segments[-1].append_context([1, 2, 3])
        recording.segments[-1].append_sampled(completion, len(recording.turns))
        recording.turns.append(Turn(completion.text, completion.truncated))
        recording.completion_ids.append(f"chatcmpl-{self.num_attempts - 1}-{len(recording.turns)}")
        recording.messages = [*MESSAGES, {"role": "assistant", "content": completion.text}]
        recording.generation = completion.generation
        recording.waits_for = f"computes since its turn {len(recording.turns)}"
        return recording.completion_ids[-1]


Program = Callable[[EpisodeCall, FakeEpisode], Any]
"""Returns the fields of an EpisodeReply, a CallResult's reason, or awaits."""


class FakeHost:
    """Implements agents.base.Gateway and EpisodeRunner. Each program is one attempt; the last one is repeated."""

    def __init__(self, *programs: Program, retries: int = 0) -> None:
        self.programs, self.retries = list(programs), retries
        self.episodes: list[FakeEpisode] = []
        self.calls: list[EpisodeCall] = []
        self.requests: list[CallRequest] = []
        self.num_cancelled = 0

    def open(self, task: EpisodeTask) -> FakeEpisode:
        self.episodes.append(FakeEpisode(task))
        return self.episodes[-1]

    async def run(self, message: Any) -> tuple[CallResult, float]:
        for _ in range(self.retries + 1):
            result = await self._attempt(message)
            if result.valid:
                break
        return result, 0.5

    async def _attempt(self, message: Any) -> CallResult:
        request = message.next_attempt()
        call = EpisodeCall.model_validate(request.arguments)
        self.requests.append(request)
        self.calls.append(call)
        program = self.programs.pop(0) if len(self.programs) > 1 else self.programs[0]
        try:
            found = program(call, self.episodes[-1])
            if asyncio.iscoroutine(found):
                found = await found
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if isinstance(found, InvalidReason):
            return CallResult(id=message.id, valid=False, reason=found, message="agent.py:3: KeyError: 'a'")
        return CallResult(id=message.id, valid=True, value=found)


async def play_hosted(host: FakeHost, policy: Any, agent: Agent | None = None, *, needs_reward: bool = True) -> Episode:
    loop = HostedLoop(agent or make_program(), host, host)
    prompt = Prompt(7, MESSAGES, [1, 2], "4", "sums", {"index": 7, "level": "easy"})
    task = EpisodeTask("g/train/1/5/2", "train", prompt, 5, 2, policy, seed=11, needs_reward=needs_reward)
    [episode] = await loop.run(task)
    return episode
