"""The spans of episodes and steps in the head, by name and attributes.

    episode                  root: from its start to its last score
      invoke_agent JOB       the conversation
        turn 0               of the conversation loop
          chat policy        one answer: queue (for a rollout), then an HTTP request for each attempt
          execute_tool NAME  a tool's function, or `user`; queue and attempts as above
        run_program          a program or an environment in its runner
      reward NAME            queue and attempts; the server adds its own queue and execution, a judge its requests
      train                  from its rows' way to the trainer to the applied update; links to its step
    step                     root: one for each step

Names follow OpenTelemetry's conventions for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/) and
HTTP; the rest begins with `rljob.`. Invariant: all spans end, also those of an episode that failed or was cancelled.
"""

import asyncio
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Self
from urllib.parse import urlsplit

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Sampling
from rljob_api.tracing.exporting import exporting, is_configured
from rljob_api.tracing.spans import STEP, Attributes, Span, current, root, span
from rljob_api.wire.base import InvalidReason, Lane
from rljob_api.wire.calls import CallResult
from rljob_api.wire.contract import SERVED_MODEL_NAME
from rljob_trainer.episodes.types import Completion, Episode, Group, ScoredResult

_OPERATION: Final = "gen_ai.operation.name"
_VALID, _REASON, _SCORE = "rljob.valid", "rljob.reason", "rljob.score"


def begin_episode(episode_id: str, lane: Lane, step: int, group: Group, sample: int) -> Span:
    return root(
        "episode",
        {
            "gen_ai.conversation.id": episode_id,
            "rljob.lane": lane,
            "rljob.step": step,
            "rljob.group": group.index,
            "rljob.sample": sample,
            "rljob.prompt": group.prompt.index,
            "rljob.evaluation_set": group.held_out or None,
        },
    )


def record_episode(episode: Span, trajectories: Sequence[Episode]) -> None:
    """Add how an episode ended."""
    if not episode.traceparent:
        return
    first = trajectories[0]
    episode.set(
        {
            "rljob.end": first.end.value,
            "rljob.turns": sum(len(each.turns) for each in trajectories),
            "rljob.segments": sum(len(each.segments) for each in trajectories),
            _SCORE: first.score,
            _VALID: all(each.score is not None for each in trajectories),
        }
    )
    if first.failure is not None:
        episode.fail(first.failure.reason)
        episode.set({_REASON: first.failure.reason, "rljob.service": first.failure.service})


def begin_agent(job: str, episode_id: str) -> Span:
    attributes = {_OPERATION: "invoke_agent", "gen_ai.agent.name": job, "gen_ai.conversation.id": episode_id}
    return span(f"invoke_agent {job}".strip(), attributes)


def begin_turn(number: int) -> Span:
    return span(f"turn {number}", {"rljob.turn": number})


def begin_chat(parent: str | None, turn: int, prompt_tokens: int, sampling: Sampling, seed: int) -> Span:
    """`parent`: None: the current span."""
    attributes: Attributes = {
        _OPERATION: "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": SERVED_MODEL_NAME,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.seed": seed,
        "gen_ai.usage.input_tokens": prompt_tokens,
        "rljob.turn": turn,
    }
    return span(f"chat {SERVED_MODEL_NAME}", attributes, kind="client", parent=parent)


def record_completion(chat: Span, completion: Completion) -> None:
    if not chat.traceparent:
        return
    chat.set(
        {
            "gen_ai.usage.output_tokens": len(completion.token_ids),
            "gen_ai.response.model": SERVED_MODEL_NAME,
            "gen_ai.response.finish_reasons": ["length" if completion.truncated else "stop"],
            "rljob.weights.oldest": min(completion.versions, default=None),
            "rljob.weights.newest": max(completion.versions, default=None),
        }
    )


def begin_tool(service: str, function: str, call_id: str) -> Span:
    """A call of a tool, or of the simulated user, which has no function."""
    if not function:
        return span(service, {"rljob.service": service})
    attributes = {
        _OPERATION: "execute_tool",
        "gen_ai.tool.name": function,
        "gen_ai.tool.call.id": call_id,
        "gen_ai.tool.type": "function",
        "rljob.service": service,
    }
    return span(f"execute_tool {function}", attributes)


def begin_program() -> Span:
    return span("run_program", {"rljob.service": "runner"})


def record_call(call: Span, result: CallResult) -> None:
    if not call.traceparent:
        return
    call.set({_VALID: result.valid, _REASON: _word(result.reason)})
    if not result.valid:
        call.fail(str(result.reason))


def begin_reward(name: str, scope: str) -> Span:
    return span(f"reward {name}", {"gen_ai.evaluation.name": name, "rljob.scope": scope})


def record_reward(reward: Span, name: str, result: ScoredResult) -> None:
    """Add a result, as the conventions' event and as attributes that searches find."""
    if not reward.traceparent:
        return
    score, reason = result.score, _word(result.cause)
    reward.set({_VALID: result.valid, _SCORE: score, _REASON: reason, "rljob.attempts": result.attempts})
    evaluation = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": score, "error.type": reason}
    reward.add_event("gen_ai.evaluation.result", evaluation)
    if not result.valid:
        reward.fail(str(result.reason))


def begin_group(members: Sequence[str]) -> Span:
    """The request for a group. It is in the trace of its first member that has one, and links to the others.

    `members`: their traceparents; empty for one without."""
    traced = [each for each in members if each]
    parent = traced[0] if traced else None
    return span("score group", {"rljob.group_size": len(members)}, parent=parent, links=traced[1:])


def begin_attempt(url: str, path: str, number: int) -> Span:
    """One HTTP request to a replica. The path of `url` is left out: an endpoint's may have a key. `number`: from 1."""
    server = urlsplit(url)
    attributes = {
        "http.request.method": "POST",
        "url.path": path,
        "server.address": server.hostname,
        "server.port": server.port or (443 if server.scheme == "https" else 80),
        "http.request.resend_count": number - 1 if number > 1 else None,
    }
    return span(f"POST {path}", attributes, kind="client")


def _word(reason: InvalidReason | None) -> str | None:
    return None if reason is None else reason.value


def begin_step(number: int) -> Span:
    return root(STEP, {"rljob.step": number})


class MiniBatchSpans:
    """The `train` spans of the episodes of one mini-batch. Leaving the context ends them."""

    def __init__(self, step: int, number: int) -> None:
        """In the span of the step, to which they link. `number`: of the mini-batch."""
        self._links, self._attributes = [current()], {"rljob.step": step, "rljob.mini_batch": number}
        self._open: dict[int, list[Span]] = {}
        self.episodes: list[str] = []
        """Traceparents of those whose spans have begun."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        for each in (each for spans in self._open.values() for each in spans):
            if error is not None and not isinstance(error, asyncio.CancelledError):
                each.fail(type(error).__name__)
            each.end()

    def begin(self, groups: Iterable[Group]) -> None:
        """The trainer gets the rows of these groups, unless it has them."""
        for group in groups:
            if group.index in self._open:
                continue
            traced = [each for each in group.episodes if each.traceparent]
            self.episodes += [each.traceparent for each in traced]
            self._open[group.index] = [
                span(
                    "train",
                    {**self._attributes, "rljob.advantage": each.advantage},
                    parent=each.traceparent,
                    links=self._links,
                )
                for each in traced
            ]


def tracing_episodes(job: RLJob) -> AbstractContextManager[None]:
    """Return the context in which spans are recorded and sent. The field turns it on, and not a variable alone: others
    may set it in all Pods of a cluster."""
    if job.spec.tracing is None or not is_configured(os.environ):
        return nullcontext()
    attributes = {"service.namespace": job.metadata.namespace or "", "rljob.job": job.metadata.name}
    return exporting("rljob-head", attributes, ratio=job.spec.tracing.sampling_ratio)
