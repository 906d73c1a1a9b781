"""One trajectory of an attempt of an episode: its transcript, its limits, and the rewards that its program posts.

    request --> plan --> engine --> answer --> a client takes it: record --> a turn

Leaves which request gets which answer to exchanges.py. Invariant: one thread at a time uses the transcript, and holds
`_lock`. A long conversation is planned in another thread: it takes tens of milliseconds to tokenize (1.6 us per token),
without the GIL, while the driver's event loop must run. A short one takes less than the way to a thread and back.
"""

import asyncio
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rljob_api.errors import UserError
from rljob_trainer.agents.base import EpisodeTask, Recording
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.conversation.transcript import PendingAnswer, Transcript
from rljob_trainer.episodes.types import Completion, ContextBreak, PromptTooLongError, ToolCall, Turn
from rljob_trainer.gateway.exchanges import Exchange, Exchanges, Sampled
from rljob_trainer.gateway.rewards import PostedReward, find_answer
from rljob_trainer.gateway.types import ModelAnswer, ModelRequest, RequestError

log = logging.getLogger(__name__)

WAITS_FOR_COMPLETION = "waited for a completion"
_Result = TypeVar("_Result")
_MAX_SHORT_BYTES = 16 * 2**10
"""Limit of the body of a request whose prompt takes a few milliseconds at most."""
_PIECE, _CHARACTERS_PER_TOKEN = 2**16, 8
"""A text of more characters per token than texts have is counted in pieces of so many, before it is tokenized whole:
that takes 150 times its size."""
_MAX_SHORT_TOKENS = 500
"""Limit of an answer whose tokens are decoded one by one, for the response's log-probs."""


@dataclass(frozen=True)
class Policy:
    """What all attempts share."""

    template: ChatTemplate
    threads: Executor
    """For the template and the transcripts."""
    max_turns: int
    """Answers of an attempt."""
    context_length: int | None
    """The longest prompt with its answer, in tokens; None: the engine alone knows."""
    retry_seconds: float
    """How long an answer waits for the retry of a client that left."""


class Attempt:
    def __init__(self, task: EpisodeTask, policy: Policy) -> None:
        self.closed: RequestError | None = None
        """Why it takes no requests any longer."""
        self.exchanges = Exchanges(policy.retry_seconds)
        self.refusal = ""
        """Message of the last request that was refused."""
        self.ignored: dict[str, None] = {}
        """Fields of requests that had no effect, in order."""
        self._task, self._policy = task, policy
        self._transcript, self._lock = Transcript(policy.template), threading.Lock()
        self._turns: list[Turn] = []
        self._completion_ids: list[str] = []
        self._rewards: dict[str, float | None] = {}
        self._reward: float | None = None
        self._generation = ""

    def join(self, request: ModelRequest, digest: bytes, num_bytes: int, *, is_retry: bool) -> Exchange:
        """Return the exchange whose answer the request gets. `num_bytes`: of its body. Raise RequestError at the turn
        limit."""
        self.check_open()
        exchange = self.exchanges.find(digest, is_retry=is_retry)
        if exchange is None:
            limit = self._policy.max_turns
            if self.exchanges.num_turns >= limit:
                message = f"the episode has reached spec.agent.maxAssistantTurns, {limit} answers of the policy"
                raise RequestError(400, "turn_limit", message)
            exchange = Exchange(digest, self._sample(request, num_bytes), time.monotonic())
            self.exchanges.add(exchange)
        self.exchanges.enter(exchange)
        return exchange

    def post_reward(self, posted: PostedReward) -> None:
        """A later reward of the same answer, or of the episode, replaces it. Raise RequestError for unknown answers."""
        self.check_open()
        completion_id = find_answer(posted, self._completion_ids)
        if completion_id is None:
            self._reward = posted.reward
        else:
            self._rewards[completion_id] = posted.reward

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the length of the prompt of a request, which gets no answer here."""
        self.check_open()
        pending = await self._run(lambda: self._plan(request), is_short=False)
        return len(pending.prompt)

    def check_open(self) -> None:
        if self.closed is not None:
            raise self.closed.with_traceback(None)

    def close(self, reason: RequestError) -> None:
        """Refuse requests from now on, and cancel those in flight. The first reason stays."""
        if self.closed is None:
            self.closed = reason
            self.exchanges.close(reason)

    def record_refusal(self, error: RequestError) -> None:
        """Record why a request got no answer; after `close`, the reason is that of the end."""
        if self.closed is None:
            self.refusal = error.message

    def read(self) -> Recording:
        """Return a copy of what is recorded: an answer may be recorded until `close`."""
        with self._lock:
            last = len(self._turns) - 1
            return Recording(
                # Their arrays never change.
                segments=[replace(segment) for segment in self._transcript.segments],
                turns=list(self._turns),
                completion_ids=list(self._completion_ids),
                breaks=[
                    ContextBreak(each.cause.value, f"{each.expected!r} became {each.found!r}")
                    for each in self._transcript.breaks
                ],
                messages=self._transcript.messages_of(last) if self._turns else [],
                whole=self._transcript.whole_of(last) if self._turns else None,
                generation=self._generation,
                rewards=dict(self._rewards),
                reward=self._reward,
                refusal=self.refusal,
                ignored=list(self.ignored),
                waits_for=self._describe_wait(),
            )

    def _describe_wait(self) -> str:
        if self.exchanges.num_waiting:
            return WAITS_FOR_COMPLETION
        return f"computes since its turn {len(self._turns)}" if self._turns else "has not called the model yet"

    async def _sample(self, request: ModelRequest, num_bytes: int) -> Sampled:
        pending = await self._run(lambda: self._plan(request), is_short=num_bytes < _MAX_SHORT_BYTES)
        asked_at = time.monotonic()
        limit, stop = self._find_limit(request, pending), [_to_text(text) for text in request.stop]
        try:
            completion = await self._task.generate(pending.prompt, limit, stop)
        except PromptTooLongError as error:
            raise _refuse_length(error.num_tokens, error.limit) from error
        except Exception as error:  # the job ends with it: see agents/hosted.py
            log.warning("the policy does not answer a program: %s", error)
            raise RequestError(503, "policy_unavailable", "the policy does not answer; see the driver's log") from error
        answered_at = time.monotonic()
        is_short = request.num_logprobs is None or len(completion.token_ids) < _MAX_SHORT_TOKENS
        answer = await self._run(lambda: self._build_answer(request, pending, completion), is_short=is_short)
        return Sampled(answer, lambda: self._run(lambda: self._record(pending, answer)), asked_at, answered_at)

    async def _run(self, call: Callable[[], _Result], *, is_short: bool = True) -> _Result:
        """Call with the lock: at once if that is short and no thread holds it, else in a thread."""

        def locked() -> _Result:
            with self._lock:
                return call()

        if is_short and self._lock.acquire(blocking=False):
            try:
                return call()
            finally:
                self._lock.release()

        return await asyncio.get_running_loop().run_in_executor(self._policy.threads, locked)

    def _plan(self, request: ModelRequest) -> PendingAnswer:
        self._refuse_endless(request)
        if request.messages is None:
            return self._transcript.plan_tokens(self._read_prompt(request.prompt or ""))
        try:
            if request.tools:
                _ = self._policy.template.tool_format  # refuses models whose calls cannot be read
            return self._transcript.plan(request.messages, request.tools)
        except UserError as error:
            raise RequestError(400, "template_error", str(error)) from error

    def _refuse_endless(self, request: ModelRequest) -> None:
        """Raise RequestError for texts that cannot fit, without the memory of their tokens."""
        length, num_tokens, messages = self._policy.context_length, 0, request.messages or []
        calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or []]
        # Not what a template may leave out, such as the reasoning of earlier turns.
        contents = [request.prompt, *(message.get("content") for message in messages)]
        texts = [*map(str, calls), *(tool.description for tool in request.tools)]
        texts += [text for text in contents if isinstance(text, str)]
        if length is None or sum(map(len, texts)) <= _CHARACTERS_PER_TOKEN * length:
            return
        for text in texts:
            for start in range(0, len(text), _PIECE):
                num_tokens += len(self._policy.template.encode(_to_text(text[start : start + _PIECE])))
                if num_tokens > 2 * length:  # more than the ends of the pieces add
                    raise _refuse_length(num_tokens, length)

    def _read_prompt(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt without messages. The engine refuses unknown and no tokens, as errors of the
        job."""
        template = self._policy.template
        token_ids = template.encode(_to_text(prompt)) if isinstance(prompt, str) else prompt
        if not token_ids:
            raise RequestError(400, "invalid_value", "prompt: must have at least one token")
        if not 0 <= min(token_ids) <= max(token_ids) < template.num_tokens:
            message = f"prompt: must have token ids from 0 to {template.num_tokens - 1}, those of the model's tokenizer"
            raise RequestError(400, "invalid_value", message)
        return token_ids

    def _find_limit(self, request: ModelRequest, pending: PendingAnswer) -> int | None:
        """Return the most tokens of the answer; None: only the job limits it."""
        length, count = self._policy.context_length, len(pending.prompt)
        if length is None:
            return request.max_tokens
        if count >= length:
            raise _refuse_length(count, length)
        return min(length - count, request.max_tokens or length)

    def _build_answer(self, request: ModelRequest, pending: PendingAnswer, completion: Completion) -> ModelAnswer:
        message = self._transcript.read_answer(pending, completion)
        is_call = "tool_calls" if message.get("tool_calls") else "stop"
        texts = (
            []
            if request.num_logprobs is None
            else [self._policy.template.decode([each]) for each in completion.token_ids]
        )
        return ModelAnswer(
            id=f"policy-{uuid.uuid4().hex}",
            created=int(time.time()),
            message=message,
            finish_reason="length" if completion.truncated else is_call,
            stop=self._find_stop(request, completion),
            completion=completion,
            num_prompt_tokens=len(pending.prompt),
            token_texts=texts,
        )

    def _find_stop(self, request: ModelRequest, completion: Completion) -> str:
        """Return the request's stop string that ended the answer: its tokens have it, and the text does not."""
        if not request.stop or completion.truncated:
            return ""
        rest = self._policy.template.decode(completion.token_ids)[len(completion.text) :]
        return next((text for text in request.stop if text in rest), "")

    def _record(self, pending: PendingAnswer, answer: ModelAnswer) -> None:
        completion = answer.completion
        self._transcript.record(pending, completion, answer.message)
        calls = [_read_call(call) for call in answer.message.get("tool_calls") or []]
        self._turns.append(Turn(completion.text, completion.truncated, tool_calls=calls))
        self._completion_ids.append(answer.id)
        self._generation = completion.generation


def _refuse_length(num_tokens: int, limit: int) -> RequestError:
    message = (
        f"This model's maximum context length is {limit} tokens, and the request has {num_tokens}: no room for an "
        "answer; shorten the conversation, or raise spec.rollout.maxModelLen"
    )
    return RequestError(400, "context_length_exceeded", message)


def _to_text(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can have and no tokenizer takes."""
    return text.encode(errors="replace").decode()


def _read_call(call: dict[str, Any]) -> ToolCall:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        arguments = None
    return ToolCall(call["id"], function["name"], arguments if isinstance(arguments, dict) else None)
