"""What judges, simulated users and teachers share: a model on the vLLM sidecar or at an endpoint, and its rate limits.

Owns the endpoint's key, the payload of requests, and the text and tokens of answers. Callers write the messages and
read the text. Invariant: the endpoint's key is sent only to the endpoint.

The ready replicas of this service share the rate limits of an endpoint equally. They are counted by the DNS records of
its headless Service, every few seconds. If a lookup fails or finds no address, the
last count remains, at first the configured number. DNS caches can delay the count after a change; see docs/judge.md.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rljob_api.errors import RLJobError, UserError
from rljob_api.manifest.services.models import EndpointLimits, JudgeEndpoint, JudgeSampling, ServedModel
from rljob_api.wire.base import InvalidReason, Message
from rljob_api.wire.contract import ENV_JUDGE_API_KEY, ENV_PEERS, ENV_POD_IP
from rljob_api.wire.discovery import resolve
from rljob_service.models import vllm_sidecar
from rljob_service.models.backend import ModelBackend
from rljob_service.models.execution import ExecutionProgress, NoScoreError
from rljob_service.models.metrics import UpstreamMetrics, count_tokens
from rljob_service.models.rate_limiter import RateLimiter
from rljob_service.models.texts import describe
from rljob_service.models.upstream import MAX_ANSWER_BYTES, Json, UpstreamClient
from rljob_service.results import StartupReport
from rljob_service.worker.forms.outcome import encodable

logger = logging.getLogger(__name__)

_POLL_SECONDS = 2.0


class ReplicaCounter:
    def __init__(self, configured: int, on_count: Callable[[int], None]) -> None:
        self._configured = configured
        self._service = os.environ.get(ENV_PEERS, "")
        self._own_address = os.environ.get(ENV_POD_IP, "")
        self._on_count = on_count
        self._poll: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Count once, then keep counting. Without a Service this is the only replica."""
        self._on_count(self._configured if self._service else 1)
        if self._service:
            await self._refresh()
            self._poll = asyncio.get_running_loop().create_task(self._poll_replicas())

    def close(self) -> None:
        if self._poll is not None:
            self._poll.cancel()

    async def _poll_replicas(self) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            await self._refresh()

    async def _refresh(self) -> None:
        try:
            addresses = await asyncio.to_thread(resolve, self._service)
        except (OSError, UnicodeError) as error:  # out of file descriptors, or a hosts file is being written
            logger.warning("cannot look up %s: %s", self._service, error)
            return
        if addresses:
            self._on_count(len({*addresses, self._own_address}))


_REASONING = ("reasoning_content", "reasoning")
"""Where servers write reasoning apart from the answer."""
_EXPECTED_PROMPT_TOKENS = 1000
"""Estimate until actual numbers are known."""


@dataclass(frozen=True)
class ChatSettings:
    """Which chat model answers, and how it is asked."""

    who: Literal["judge", "user", "teacher"]
    """In messages."""
    path: str
    """Field that has `model` or `endpoint`, in messages."""
    model: ServedModel | None
    """On the sidecar."""
    endpoint: JudgeEndpoint | None
    """None: the sidecar."""
    sampling: JudgeSampling
    num_requests: int = 1
    """Requests of one execution, sent at once."""
    system_prompt: str | None = None
    """System message of each question, also of the warm-up; None: the caller writes it."""
    payload: Json = field(default_factory=dict)
    """Additional fields of each request."""
    route: str = "/chat/completions"
    max_answer_bytes: int = MAX_ANSWER_BYTES


class ChatAnswer(NamedTuple):
    text: str | NoScoreError
    """Never empty; or why there is none."""
    tokens: float | None
    """Tokens of the prompt and the answer; None if the endpoint did not report them."""


class ChatBackend(ModelBackend):
    def __init__(
        self,
        settings: ChatSettings,
        replicas: int,
        metrics: UpstreamMetrics,
        on_fatal_error: Callable[[RLJobError], None],
        *,
        limits_executions: bool = True,
    ) -> None:
        """`replicas`: that share the limits, until they are counted. With `limits_executions` false, the caller asks
        `chat_limiter` before each request. Raises UserError if the key or vLLM's socket is missing.
        """
        endpoint = settings.endpoint
        key = _take_key(endpoint) if endpoint else ""
        limits = endpoint.limits if endpoint else EndpointLimits()
        tokens_per_request = _EXPECTED_PROMPT_TOKENS + settings.sampling.max_tokens
        self.chat_limiter = RateLimiter(
            limits, settings.num_requests, float(settings.num_requests * tokens_per_request)
        )
        limiter = self.chat_limiter if limits_executions else RateLimiter()
        super().__init__(limiter, uses_vllm=endpoint is None)
        self._chat_settings, self._chat_metrics = settings, metrics
        metrics.watch_pause(lambda: self.chat_limiter.pause_seconds)
        self._replicas = ReplicaCounter(replicas, self._set_replicas) if limits != EndpointLimits() else None
        system = settings.system_prompt
        self.system_messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.payload = _build_payload(settings)
        self.upstream = UpstreamClient(
            self._session,
            (endpoint.url if endpoint else f"{'' if self._engines else vllm_sidecar.URL}/v1").rstrip("/")
            + settings.route,
            self.chat_limiter,
            metrics,
            name=f"the {settings.who}'s {'endpoint' if endpoint else 'vLLM'}",
            secret=key,
            headers=endpoint.headers if endpoint else None,
            engines=self._engines,
            max_answer_bytes=settings.max_answer_bytes,
            on_refused=lambda answer: on_fatal_error(
                UserError(f"{settings.path}.endpoint: {answer}; correct its url, model or apiKeySecretRef")
            ),
        )

    @property
    def pause_seconds(self) -> float:
        return self.chat_limiter.pause_seconds

    async def start(self) -> StartupReport:
        if self._replicas is not None:
            await self._replicas.start()
        if self._engines is not None:
            self._engines.start()
        if self._sidecar is not None:
            await self._warm_up(self._ask_for_nothing, f"{self._chat_settings.path}.model")
        return StartupReport(entrypoint=str(self.payload["model"]), signature=self._chat_settings.who)

    async def ask(self, messages: list[Message], progress: ExecutionProgress) -> ChatAnswer:
        """Send one question. A failure is a value, so that it does not affect other questions of the execution."""
        tokens = None
        try:
            answer = await self.upstream.post(self.payload | {"messages": messages}, progress)
            tokens = count_tokens(answer, "prompt") + count_tokens(answer, "completion") or None
            return ChatAnswer(_text_of(answer, self._chat_settings.who, self.upstream.hide_key), tokens)
        except NoScoreError as error:
            return ChatAnswer(error, tokens)

    async def close(self) -> None:
        if self._replicas is not None:
            self._replicas.close()
        self.upstream.close()
        await super().close()

    async def _ask_for_nothing(self, progress: ExecutionProgress) -> None:
        """Send a minimal question that initializes everything in vLLM, including the grammar of a schema."""
        messages = [*self.system_messages, {"role": "user", "content": "Hello"}]
        await self.upstream.post(self.payload | {"messages": messages, "max_tokens": 1}, progress)

    def _set_replicas(self, number: int) -> None:
        self.chat_limiter.set_replicas(number)
        self._chat_metrics.record_replicas(number)


def _take_key(endpoint: JudgeEndpoint) -> str:
    """Remove the key from the environment, so that child processes and dumps do not contain it."""
    key = os.environ.pop(ENV_JUDGE_API_KEY, "").strip()
    reference = endpoint.api_key_secret_ref
    if reference and not key:
        raise UserError(f"${ENV_JUDGE_API_KEY} is not set: Secret {reference.name} has no key {reference.key}")
    return key


def _build_payload(settings: ChatSettings) -> Json:
    endpoint, sampling = settings.endpoint, settings.sampling
    payload: Json = {
        "model": endpoint.model if endpoint else vllm_sidecar.SERVED_MODEL_NAME,
        **({} if sampling.temperature is None else {"temperature": sampling.temperature}),
        endpoint.max_tokens_field if endpoint else "max_tokens": sampling.max_tokens,
    }
    if settings.model is not None and settings.model.chat_template_arguments:
        payload["chat_template_kwargs"] = settings.model.chat_template_arguments
    return payload | settings.payload | sampling.extra_body


def _text_of(answer: Json, who: str, hide_key: Callable[[str], str]) -> str:
    """Return the model's text, or without one the arguments of a judge's last call. Raises NoScoreError if it is
    missing or incomplete, or if there is no chat completion."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        text = encodable(_join_parts(message.get("content")))
        refusal = message.get("refusal")
        if who == "judge" and not text and message.get("tool_calls"):
            text = encodable(str(message["tool_calls"][-1]["function"]["arguments"]))
        finish_reason = choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        shown = describe(hide_key(str(answer)))
        raise NoScoreError(InvalidReason.BAD_RETURN, f"not a chat completion: {shown}") from None
    if finish_reason == "content_filter":
        shown = f" after {describe(text)}" if text else ""
        raise NoScoreError(InvalidReason.CONTENT_FILTER, f"a filter withheld the {who}'s answer{shown}")
    if refusal and not text:
        raise NoScoreError(InvalidReason.REFUSED, f"the {who} refused: {describe(refusal)}")
    if finish_reason == "length":
        problem = f"the {who}'s answer was cut off at sampling.maxTokens: {describe(text)}"
        raise NoScoreError(InvalidReason.BAD_RETURN, problem)
    if not text:
        there = next((name for name in _REASONING if message.get(name)), "")
        more = f"; it has {there} alone: {describe(message[there])}" if there else ""
        raise NoScoreError(InvalidReason.EMPTY, f"the {who}'s answer is empty{more}")
    return text


def _join_parts(content: Any) -> str:
    """Return the text of a message: null, a string, or a list of parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""
