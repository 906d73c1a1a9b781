"""All rewards of a job, and a group's way through them: which reward sees a sample alone, and which a whole group.

With scope group, a reward waits for the group's last episode; with sampleThenGroup, for the last result of its
samples. In episodes with several seats each trajectory is a sample, and those that are compared with each other are
scored together. Invariants: an invalid sample stays invalid, and no later group request contains it. An episode that
failed is in no request, and nothing waits for it.

`RequestBuilder` makes the request of an episode; rljob_inputs.score_requests defines what that is.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import aiohttp
import numpy as np

from rljob_api.errors import UserError
from rljob_api.manifest.agent import CompletionChoice
from rljob_api.manifest.services.reward import FailurePolicy, Reward
from rljob_api.wire.base import Lane
from rljob_api.wire.contract import ENV_REWARD_TOKENS, ENV_TOKEN
from rljob_api.wire.driver_status import RewardDemand
from rljob_api.wire.scores import GroupRequest, ScoreRequest, ScoreResult, TokenSegment, WholeCompletion
from rljob_inputs import score_requests
from rljob_inputs.prompts import Prompt
from rljob_inputs.score_requests import Answer, Conversation, Decoder
from rljob_trainer import traces
from rljob_trainer.concurrency import run_all
from rljob_trainer.episodes.types import NOT_SAMPLED, Episode, ScoredResult, Segment, Turn, Whole
from rljob_trainer.outages import Outages
from rljob_trainer.replicas.http import auth_headers
from rljob_trainer.rewards.messages import RewardCall
from rljob_trainer.services.client import ServiceClient
from rljob_trainer.services.demand import ScoreForecast


@dataclass
class RequestBuilder:
    """`choice`: spec.agent.completion. `total_steps`: spec.schedule.steps. `has_teacher`: whether one reads the
    segments."""

    decoder: Decoder
    choice: CompletionChoice = "auto"
    total_steps: int = 0
    has_teacher: bool = False
    _texts: dict[int, str] = field(default_factory=dict)
    """The text of each token id so far."""

    def build(
        self, request_id: str, lane: Lane, prompt: Prompt, episode: Episode, finished_steps: int = 0
    ) -> ScoreRequest:
        """Return the request for an episode. A conversation adds its messages, turns, state and end to extra_info, and
        one of several seats the name of its seat. `finished_steps`: before it began."""
        segment, (start, end) = _find_last_answer(episode.segments)
        answer = Answer(
            text=episode.text,
            truncated=episode.truncated,
            num_tokens=episode.num_sampled,
            prompt_ids=segment.token_ids[:start].tolist(),
            completion_ids=segment.token_ids[start:end].tolist(),
        )
        conversation = None
        if episode.messages:
            conversation = Conversation(
                messages=episode.messages,
                turns=[_describe_turn(turn) for turn in episode.turns],
                state=episode.state,
                end=episode.end.value,
                whole=None if episode.whole is None or self.choice == "last" else self._decode(episode.whole),
            )
        request = score_requests.build_request(request_id, lane, prompt, answer, conversation, self.choice)
        extra = {**request.extra_info, "seat": episode.seat} if episode.seat else request.extra_info
        steps = {"finished_steps": finished_steps, "total_steps": self.total_steps}
        segments = [self._describe(each) for each in episode.segments] if self.has_teacher else None
        return request.model_copy(update={"extra_info": extra, "segments": segments, **steps})

    def _describe(self, segment: Segment) -> TokenSegment:
        ids, bounds = segment.token_ids.tolist(), np.flatnonzero(np.diff(segment.loss_mask, prepend=0, append=0))
        for token in set(ids) - self._texts.keys():
            self._texts[token] = self.decoder.decode([token], skip_special_tokens=False)
        sampled = [(int(start), int(end)) for start, end in bounds.reshape(-1, 2)]
        return TokenSegment(token_ids=ids, sampled=sampled, texts=[self._texts[token] for token in ids])

    def _decode(self, whole: Whole) -> WholeCompletion:
        prompt_ids, completion_ids = whole.prompt_ids.tolist(), whole.completion_ids.tolist()
        text = self.decoder.decode(completion_ids, skip_special_tokens=True)
        return WholeCompletion(text=text, messages=whole.messages, prompt_ids=prompt_ids, completion_ids=completion_ids)


def _describe_turn(turn: Turn) -> dict[str, object]:
    calls = [{"name": call.name, "arguments": call.arguments, "error": call.error} for call in turn.tool_calls]
    return score_requests.describe_turn(turn.text, turn.reward, calls)


def _find_last_answer(segments: Sequence[Segment]) -> tuple[Segment, tuple[int, int]]:
    """Return the segment of the last turn, and where its tokens begin and end. It is not always the last segment: a
    program may continue an earlier one."""
    last = max(int(segment.turns.max(initial=NOT_SAMPLED)) for segment in segments)
    if last == NOT_SAMPLED:
        segment = segments[-1]
        return segment, (len(segment.turns), len(segment.turns))
    segment = next(segment for segment in segments if last in segment.turns)
    is_last = segment.turns == last
    start = int(is_last.argmax())
    return segment, (start, start + int(np.count_nonzero(is_last)))


_MAX_GROUPS = 65_536
"""Groups whose first request is known; far more than are under way."""


class RewardClient(ServiceClient[ScoreResult]):
    def __init__(
        self,
        reward: Reward,
        session: aiohttp.ClientSession,
        decoder: Decoder | None = None,
        *,
        index: int = 0,
        outages: Outages | None = None,
    ) -> None:
        """`decoder`: for rewards that read texts with special tokens. `index`: in spec.rewards."""
        # No request goes to http://rollouts: a HintedPolicy asks the rollouts. A client with a URL looks for no Pods.
        url = reward.http.url if reward.http else "http://rollouts" * (reward.hint is not None)
        super().__init__(
            reward,
            f"spec.rewards: {reward.name}",
            session,
            source=f"spec.rewards[{index}].{reward.kind or 'rewardModelRef'}",
            outages=outages,
            name=f"reward {reward.name}",
            url=url,
            headers={} if url else auth_headers(_token_variable(reward)),  # never send a token elsewhere
            # The operator may scale these to zero, too.
            allow_empty=reward.reward_model_ref is not None,
            pins_version=not url,
            hedging=reward.hedging,
        )
        self.reward, self._decoder = reward, decoder
        self._protocol = reward.http.protocol if reward.http else "rljob"
        self.num_rescored = 0
        """Samples that were rescored because the reward's version changed in the middle of a step."""
        self._group_since: dict[str, float] = {}
        """By group, the oldest first."""

    def begin(self) -> None:
        """Start a collection, which one version scores."""
        if self.versions:
            self.versions.begin()

    def is_stale(self, result: ScoreResult) -> bool:
        return self.versions is not None and not self.versions.pin.accepts(result.version)

    async def score(self, request: ScoreRequest | GroupRequest) -> list[ScoredResult]:
        """Score the samples together.  [samples]  Raise UserError with failJob, TransientError without any response."""
        call = RewardCall(request, self._protocol, self._decoder)
        results, pending = await self.call(call, self._place(request))
        policy = self.reward.failure_policy
        for result in results:
            if not result.valid and policy.action == "failJob" and policy.score_of(result.reason) is None:
                raise UserError(
                    f"spec.rewards: {self.reward.name} returned no valid score ({result.reason}: {result.message}) and "
                    f"its failurePolicy.action is failJob"
                )
        latency, attempts = pending.seconds, pending.num_requests
        retries = max(0, attempts - 1)
        return [
            ScoredResult.model_construct(**dict(r), attempts=attempts, retries=retries, latency_seconds=latency)
            for r in results
        ]

    def _place(self, request: ScoreRequest | GroupRequest) -> float:
        """Return when the first request of the group arrived. A group trains when all its samples are scored, so they
        are sent together, before those of groups that came later."""
        group = request.id if isinstance(request, GroupRequest) else request.id.rpartition("/")[0]
        since = self._group_since.setdefault(group, self.replicas.now())
        if len(self._group_since) > _MAX_GROUPS:
            del self._group_since[next(iter(self._group_since))]
        return since

    def statistics(self) -> dict[str, float]:
        """Return the current value of each metric `rljob_reward_NAME`."""
        return super().statistics() | {
            "hedges": self.hedges.num_hedges if self.hedges else 0,
            "hedge_wins": self.hedges.num_wins if self.hedges else 0,
            "rescored": self.num_rescored,
        }

    def describe_wait(self) -> str:
        """Return the age of the oldest request and what is missing; empty if nothing is in flight."""
        return f"({self.reward.name}){self._describe_oldest()}" if self.in_flight else ""


def _token_variable(reward: Reward) -> str:
    """Return the environment variable with the token for this reward's servers: the job's, or a RewardModel's."""
    variables: dict[str, str] = json.loads(os.environ.get(ENV_REWARD_TOKENS) or "{}")
    variable = variables.get(reward.name, ENV_TOKEN)
    if variable != ENV_TOKEN and not os.environ.get(variable):
        raise UserError(
            f"spec.rewards: {reward.name}: {variable}, its token's variable in ${ENV_REWARD_TOKENS}, is not set; "
            "check that the Secret of its RewardModel exists"
        )
    return variable


class RewardClients:
    def __init__(
        self,
        rewards: Sequence[Reward],
        session: aiohttp.ClientSession,
        decoder: Decoder | None = None,
        outages: Outages | None = None,
        hinted: Callable[..., RewardClient] = RewardClient,
    ) -> None:
        """`rewards`: of the job, in order. `decoder`: for rewards that read texts with special tokens. `hinted`: makes
        the client of a teacher that is the policy itself."""
        self.clients = {
            reward.name: (RewardClient if reward.hint is None else hinted)(
                reward, session, decoder, index=index, outages=outages
            )
            for index, reward in enumerate(rewards)
        }

    async def start(self) -> None:
        for client in self.clients.values():
            await client.start()

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()

    def begin(self) -> None:
        for client in self.clients.values():
            client.begin()

    def open_group(self, group_id: str, lane: Lane, size: int, names: set[str] | None = None) -> GroupScorer:
        """Return a scorer for one group. `names`: the rewards that score it; None for all."""
        clients = {name: client for name, client in self.clients.items() if names is None or name in names}
        return GroupScorer(clients, group_id, lane, size)

    def find_stale(self, episodes: Iterable[Episode]) -> set[str]:
        """Return the rewards that scored any of `episodes` with another version than the pinned one."""
        return {
            name
            for episode in episodes
            for name, result in episode.results.items()
            if self.clients[name].is_stale(result)
        }

    def demand(self, forecast: ScoreForecast, held_out: ScoreForecast | None = None) -> dict[str, RewardDemand]:
        """Return the demand in executions: of groups with scope group, else of samples, since a group step is short.
        `held_out`: the part of evaluations, which is all that some rewards score; None: nothing."""
        demand = {}
        for name, client in self.clients.items():
            found = held_out or ScoreForecast() if client.reward.use == "evaluation" else forecast
            demand[name] = (found.in_groups() if client.reward.scope == "group" else found).demand_on(client.load())
        return demand

    def describe_wait(self, num_open: int, num_total: int) -> str:
        """Describe the wait for scores; empty if no request is in flight."""
        waits = [wait for client in self.clients.values() if (wait := client.describe_wait())]
        return f"waits for {num_open} of {num_total} rewards {'; '.join(waits)}" if waits else ""


Peers = tuple[str, int | None]
"""See Episode.peers."""
_ALL: Peers = ("", None)


class _Member(NamedTuple):
    """A sample of a group."""

    request: ScoreRequest
    result: ScoredResult | None
    """Its own result, if the reward scores samples first."""
    peers: Peers
    traceparent: str = ""
    """That of the span that waits for the group's result."""


class GroupScorer:
    def __init__(self, clients: Mapping[str, RewardClient], group_id: str, lane: Lane, size: int) -> None:
        self._clients = clients
        self._group_id, self._lane = group_id, lane
        self._barriers = {
            name: _GroupBarrier(size, partial(self._score_together, client))
            for name, client in clients.items()
            if client.reward.scope != "sample"
        }

    def expect(self, num_trajectories: int) -> None:
        """An episode has ended with this many samples; call it before `score` and `skip`. Not needed for one."""
        for barrier in self._barriers.values():
            barrier.grow(num_trajectories - 1)

    async def score(
        self, position: int, request: ScoreRequest, ended_at: float | None = None, peers: Peers = _ALL
    ) -> dict[str, ScoredResult]:
        """Return a sample's results by reward; call it once a position. `ended_at`: of its episode; default: now.
        `peers`: samples with the same are scored together."""
        ended_at = time.monotonic() if ended_at is None else ended_at
        results = await run_all([self._score_by(name, position, request, ended_at, peers) for name in self._clients])
        return dict(zip(self._clients, results, strict=True))

    async def skip(self) -> None:
        """Score the others without this sample; call it instead of `score`. The last one scores the group."""
        await run_all([barrier.leave() for barrier in self._barriers.values()])

    async def _score_by(
        self, name: str, position: int, request: ScoreRequest, ended_at: float, peers: Peers
    ) -> ScoredResult:
        client = self._clients[name]
        result = None
        with traces.begin_reward(name, client.reward.scope) as span:
            if client.reward.scope != "group":
                [result] = await client.score(request)
            if result is None or client.reward.scope == "sampleThenGroup":
                member = _Member(request, result, peers, span.traceparent)
                result = await self._barriers[name].join(position, member)
            # Each sample's latency starts at its own end: the first of a group also waited for the last one.
            result = result.model_copy(update={"latency_seconds": time.monotonic() - ended_at})
            result = apply_failure_scores(result, client.reward.failure_policy)
            traces.record_reward(span, name, result)
        return result

    async def _score_together(self, client: RewardClient, members: Sequence[_Member]) -> list[ScoredResult]:
        """Score the group, or each part of it with the same peers.  [samples]"""
        parts: dict[Peers, list[int]] = {}
        for number, member in enumerate(members):
            parts.setdefault(member.peers, []).append(number)
        names = [self._group_id if peers == _ALL else f"{self._group_id}/{_describe(peers)}" for peers in parts]
        of_parts = await run_all(
            [
                self._score_part(client, name, [members[i] for i in numbers])
                for name, numbers in zip(names, parts.values(), strict=True)
            ]
        )
        found = zip((i for numbers in parts.values() for i in numbers), itertools.chain(*of_parts), strict=True)
        return [result for _, result in sorted(found, key=lambda pair: pair[0])]

    async def _score_part(self, client: RewardClient, group_id: str, members: Sequence[_Member]) -> list[ScoredResult]:
        """Score samples together; with results of samples, only the valid ones.  [samples]"""
        with traces.begin_group([member.traceparent for member in members]):
            if client.reward.scope == "group":
                samples = [member.request for member in members]
                return await client.score(GroupRequest(id=group_id, lane=self._lane, samples=samples))
            sample_results = [member.result for member in members if member.result is not None]
            valid = [(each.request, each.result) for each in members if each.result is not None and each.result.valid]
            if not valid:
                return sample_results
            fields = set(ScoreResult.model_fields)
            request = GroupRequest(
                id=group_id,
                lane=self._lane,
                samples=[request for request, _ in valid],
                results=[ScoreResult(**result.model_dump(include=fields)) for _, result in valid],
            )
            group_results = iter(await client.score(request))
            return [merge(result, next(group_results)) if result.valid else result for result in sample_results]


def _describe(peers: Peers) -> str:
    seat, sample = peers
    return seat if sample is None else f"{sample}/{seat}"


class _GroupBarrier:
    """Where the samples of a group wait for each other. The last one runs `work` for all."""

    def __init__(self, size: int, work: Callable[[Sequence[_Member]], Awaitable[list[ScoredResult]]]) -> None:
        self._size, self._work = size, work
        self._members: dict[int, _Member] = {}
        self._results: asyncio.Future[list[ScoredResult]] = asyncio.Future()

    async def join(self, position: int, member: _Member) -> ScoredResult:
        self._members[position] = member
        await self._run_if_complete()
        results = await asyncio.shield(self._results)  # a cancelled sample leaves the others waiting
        return results[sorted(self._members).index(position)]

    def grow(self, count: int) -> None:
        """Wait for more samples."""
        self._size += count

    async def leave(self) -> None:
        """Wait for one sample fewer."""
        self._size -= 1
        await self._run_if_complete()

    async def _run_if_complete(self) -> None:
        if not self._members or len(self._members) != self._size:
            return
        try:
            self._results.set_result(await self._work([self._members[i] for i in sorted(self._members)]))
        except asyncio.CancelledError:
            self._results.cancel()
            raise
        except Exception as error:
            self._results.set_exception(error)


def apply_failure_scores(result: ScoredResult, policy: FailurePolicy) -> ScoredResult:
    """Return the result with the score that the job gives to this failure, if it gives one. It keeps the reason."""
    score = policy.score_of(result.reason)
    if score is None:
        return result
    return result.model_copy(update={"valid": True, "score": score, "reason": None, "failed_as": result.reason})


def merge(sample_result: ScoredResult, group_result: ScoredResult) -> ScoredResult:
    """Return a sample's result after its group was scored.

    The group's score counts, and the components of both are kept. The version is the older one, so that a step whose
    two halves were scored by different versions is noticed.
    """
    components = {**sample_result.components, **group_result.components} if group_result.valid else {}
    return group_result.model_copy(
        update={
            "components": components,
            "pred": sample_result.pred if group_result.pred is None else group_result.pred,
            "queue_seconds": sample_result.queue_seconds + group_result.queue_seconds,
            "execute_seconds": sample_result.execute_seconds + group_result.execute_seconds,
            "version": sample_result.version or group_result.version,
            "attempts": sample_result.attempts + group_result.attempts,
            "retries": sample_result.retries + group_result.retries,
        }
    )
