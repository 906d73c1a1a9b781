"""Episodes of environments and programs: a runner plays them, and calls the policy through the gateway.

    open at the gateway --> the runner: attempts, each with its own key --> what the gateway recorded --> the episode,
                                                                            or the trajectories of its seats

Owns what makes an episode valid and which rewards it gets. Leaves tokens to the gateway, and retries to the runner's
client. Invariant: each episode ends, valid or with a reason: what a program does never ends the job. Only UserError and
TransientError leave `run`, of the runner's client or of the policy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from rljob_api.manifest.agent import Agent
from rljob_api.manifest.services.runner import RUNNER_SERVICE, Runner
from rljob_api.wire.base import InvalidReason, Lane, Message
from rljob_api.wire.calls import CallRequest, CallResult, EpisodeCall, EpisodeReply, SeatReply
from rljob_api.wire.contract import POLICY_MODEL
from rljob_trainer.agents.base import AGENT, EpisodeRunner, EpisodeTask, Gateway, Generate, OpenEpisode, Recording
from rljob_trainer.concurrency import end_tasks
from rljob_trainer.episodes.types import (
    Completion,
    Episode,
    EpisodeEnd,
    EpisodeFailure,
    PromptTooLongError,
    has_own_reward,
    prompt_segment,
)
from rljob_trainer.outages import deadline

REASON_NO_TURNS = "no_turns"
_RUNNER_PATH = "spec.agent.runner"

_Result = TypeVar("_Result")


class _Trajectory(NamedTuple):
    """One conversation of an episode, and what the runner returned for it."""

    recording: Recording
    reply: EpisodeReply
    """With seats: what concerns this trajectory alone."""
    failure: EpisodeFailure | None = None


@dataclass(eq=False)
class HostedLoop:
    """`away`: returns the seconds of outages so far, which no episode pays for."""

    spec: Agent
    gateway: Gateway
    runner: EpisodeRunner
    _away: Callable[[], float] = lambda: 0.0

    async def run(self, task: EpisodeTask) -> list[Episode]:
        generate = _Watched(task.generate)
        opened = self.gateway.open(replace(task, generate=generate))
        try:
            result = await self._play(task, opened, generate)
            recording = opened.read()
        finally:
            opened.close()
        reply, failure = self._read_reply(result, recording)
        return [
            self._build(task, each.recording, each.reply, failure or each.failure, number)
            for number, each in enumerate(_list_trajectories(recording, reply, self.spec.seats))
        ]

    async def _play(self, task: EpisodeTask, opened: OpenEpisode, generate: _Watched) -> CallResult | None:
        """Return how the runner ended the episode, after all attempts; None if it took too long."""
        seconds = min(self.spec.episode_seconds, (self.spec.runner or Runner()).deadline_seconds)
        ends_at = time.monotonic() + seconds - self._away()
        message = _Message(task, opened, self.spec.turn_limit, self.spec.seats, lambda: ends_at + self._away())
        try:
            async with deadline(self.spec.episode_seconds, self._away) as scope:
                result, _ = await generate.run_until_failed(self.runner.run(message))
        except TimeoutError:
            if not scope.expired():
                raise
            return None
        return result

    def _build(
        self,
        task: EpisodeTask,
        recording: Recording,
        reply: EpisodeReply,
        failure: EpisodeFailure | None,
        trajectory: int,
    ) -> Episode:
        episode = Episode(
            prompt_index=task.prompt.index,
            group=task.group,
            sample=task.sample,
            segments=recording.segments,
            turns=recording.turns,
            generation=recording.generation,
            own_reward=recording.reward if reply.reward is None else reply.reward,
            messages=recording.messages or _prompt_of(task),
            whole=recording.whole,
            state=reply.state,
            info=reply.info,
            end=EpisodeEnd.RETURNED,
            breaks=recording.breaks,
            ignored=recording.ignored,
            seat=recording.seat,
            trajectory=trajectory,
            baseline=reply.seats[0].baseline if reply.seats else "group",
        )
        if not episode.segments:  # no answer: one row, on which nothing trains
            episode.segments = [prompt_segment(task.prompt)]
        unknown = _reward_turns(episode, recording.completion_ids, {**recording.rewards, **reply.rewards})
        episode.failure = failure or self._find_problem(task, episode, unknown, recording)
        if episode.failure is not None:
            episode.end = EpisodeEnd.FAILED
        return episode

    def _read_reply(
        self, result: CallResult | None, recording: Recording
    ) -> tuple[EpisodeReply, EpisodeFailure | None]:
        """Return what the runner returned; an empty reply and the reason without one."""
        if result is None:
            doing = recording.waits_for or "waited for the runner"
            message = f"the episode took more than {self.spec.episode_seconds:g} s, while it {doing}"
            failure = EpisodeFailure(AGENT, "spec.agent.episodeSeconds", str(InvalidReason.DEADLINE), message)
            return EpisodeReply(), failure
        if not result.valid:
            return EpisodeReply(), _fail(str(result.reason), _with_refusal(result.message, recording))
        try:
            return EpisodeReply.model_validate(result.value, extra="ignore"), None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            return EpisodeReply(), _fail(str(InvalidReason.BAD_RETURN), f"not a result: {where}: {first['msg']}")

    def _find_problem(
        self, task: EpisodeTask, episode: Episode, unknown: list[str], recording: Recording
    ) -> EpisodeFailure | None:
        """Return why an episode that has returned is invalid nevertheless."""
        if not episode.turns:
            message = f"the {self.spec.type} ended without an answer of the model"
            return _fail(REASON_NO_TURNS, _with_refusal(message, recording))
        if unknown:
            message = f"a reward is for {', '.join(unknown)}, and no answer of the episode has that id or number"
            return _fail(str(InvalidReason.BAD_RETURN), message)
        if task.needs_reward and not has_own_reward(episode):
            message = (
                f"the {self.spec.type} gave no reward, neither for the episode nor for an answer, and no reward of "
                "spec.rewards scores it"
            )
            return _fail(str(InvalidReason.ABSTAINED), message)
        return None


@dataclass(frozen=True)
class _Message:
    """Implements agents.base.EpisodeMessage."""

    task: EpisodeTask
    opened: OpenEpisode
    max_turns: int
    seats: list[str] | None
    ends_at: Callable[[], float]
    """On the monotonic clock. Outages move it."""

    @property
    def id(self) -> str:
        return self.task.id

    @property
    def lane(self) -> Lane:
        return self.task.lane

    def next_attempt(self) -> CallRequest:
        attempt, access = self.opened.start_attempt()
        prompt = self.task.prompt
        call = EpisodeCall(
            episode=self.task.id,
            attempt=attempt,
            model=access,
            prompt=_prompt_of(self.task),
            ground_truth=prompt.ground_truth,
            data_source=prompt.data_source,
            extra_info=prompt.extra_info,
            seed=self.task.seed,
            max_turns=self.max_turns,
            seats=self.seats,
            deadline_seconds=max(0.0, self.ends_at() - time.monotonic()),
        )
        return CallRequest(id=self.task.id, lane=self.task.lane, arguments=call.model_dump())

    def end_attempt(self) -> None:
        self.opened.end_attempt()


class _Watched:
    """Implements Generate. An error of the policy ends the job; the program would only see a request that fails."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def __call__(
        self, token_ids: list[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        try:
            return await self._generate(token_ids, max_tokens, stop)
        except PromptTooLongError:  # the program's own
            raise
        except Exception as error:
            if not self._failed.done():
                self._failed.set_result(error)
            raise

    async def run_until_failed(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of `work`. Cancel it and raise the policy's error if there is one before."""
        running = asyncio.ensure_future(work)
        try:
            await asyncio.wait((running, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise self._failed.result()
            return running.result()
        finally:
            await end_tasks(running)


def _list_trajectories(
    recording: Recording, reply: EpisodeReply, seats: Sequence[str] | None = None
) -> list[_Trajectory]:
    """Return the trajectories that train: the recording, or in an episode with seats, those of the seats.

    There, the policy's other answers belong to a player that does not train. A session that the reply does not name was
    given up by the environment, such as for another try, if the reply names sessions of its seat. If no seat has
    played, what is recorded stays, to show how the episode ended. `seats`: agent.seats.
    """
    replies = {(each.seat, each.session): each for each in reply.seats}
    with_sessions = {each.seat for each in reply.seats if each.session}
    played = [
        each
        for each in recording.seats
        if each.turns and ((each.seat, each.session) in replies or each.seat not in with_sessions)
    ]
    if not played:
        return [_Trajectory(recording, reply.model_copy(update={"seats": []}), _find_unplayed(reply, seats))]
    unknown = _find_unknown_rewards(played, reply.rewards)
    failure = _fail(str(InvalidReason.BAD_RETURN), unknown) if unknown else None
    return [_Trajectory(each, _narrow(reply, replies.get((each.seat, each.session)), each), failure) for each in played]


def _find_unplayed(reply: EpisodeReply, seats: Sequence[str] | None) -> EpisodeFailure | None:
    """Return the failure of an episode in which seats were to play, and none has called the model."""
    names = list(dict.fromkeys([*(each.seat for each in reply.seats), *(seats or ())]))
    if not names:
        return None
    message = f"none of the seats ({', '.join(names)}) has called the model; requests of a seat have its own model, "
    return _fail(REASON_NO_TURNS, f"{message}such as {POLICY_MODEL}/{names[0]}")


def _find_unknown_rewards(played: Sequence[Recording], rewards: Mapping[str, float | None]) -> str:
    """Return why rewards of single answers belong to no trajectory; empty if all do."""
    known = {completion_id for each in played for completion_id in each.completion_ids}
    unknown = [key for key in rewards if key not in known]
    if not unknown:
        return ""
    return (
        f"a reward is for {', '.join(unknown)}, and no answer of a seat has that id; in an episode with seats, numbers "
        "of turns belong into the rewards of a seat"
    )


def _narrow(reply: EpisodeReply, own: SeatReply | None, recording: Recording) -> EpisodeReply:
    """Return what a reply says about one trajectory. `own`: its entry; None without one."""
    own = own or SeatReply(seat=recording.seat, session=recording.session)
    of_answers = {key: value for key, value in reply.rewards.items() if key in recording.completion_ids}
    rewards, info = {**of_answers, **own.rewards}, {**reply.info, **own.info}
    changes: dict[str, Any] = {"rewards": rewards, "info": info, "seats": [own]}
    if own.reward is not None:
        changes["reward"] = own.reward
    return reply.model_copy(update=changes)


def _prompt_of(task: EpisodeTask) -> list[Message]:
    assert isinstance(task.prompt.prompt, list), "data.format is chat"
    return list(task.prompt.prompt)


def _reward_turns(episode: Episode, completion_ids: list[str], rewards: Mapping[str, float | None]) -> list[str]:
    """Give the turns their rewards. Null rewards nothing. Return the keys that name no turn."""
    numbers = {str(number): number for number in range(len(episode.turns))}
    numbers |= {completion_id: number for number, completion_id in enumerate(completion_ids)}
    for key, reward in rewards.items():
        if key in numbers and reward is not None:
            episode.turns[numbers[key]].reward = reward
    return [key for key in rewards if key not in numbers]


def _with_refusal(message: str, recording: Recording) -> str:
    return f"{message}; the gateway had refused a request: {recording.refusal}" if recording.refusal else message


def _fail(reason: str, message: str) -> EpisodeFailure:
    return EpisodeFailure(RUNNER_SERVICE, _RUNNER_PATH, reason, message)
