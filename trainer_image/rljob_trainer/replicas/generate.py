"""vLLM's token-in, token-out protocol, as far as RLJob uses it: one request, and its response as a stream. Pure.

    POST /inference/v1/generate
    {"model": "policy", "token_ids": [1, 2], "stream": true, "output_mode": "text", "cache_salt": "GENERATION:VERSION",
     "sampling_params": {"max_tokens": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop": ["END"],
                         "stop_token_ids": [2], "seed": 7, "logprobs": 0, "stream_interval": 32}}

    200, text/event-stream; one event for the first token, for every `stream_interval` tokens after it, and for the end:
    data: {"choices": [{"text": "4", "token_ids": [19], "logprobs": {"content": [{"logprob": -0.1}]},
                        "finish_reason": null, "weight_versions": null}]}

    data: {"choices": [{"text": "2", "token_ids": [17, 0], "logprobs": {"content": [{"logprob": -0.2}, {"logprob": 0}]},
                        "finish_reason": "stop",
                        "weight_versions": [{"version": "g:1", "start": 0, "end": 2},
                                            {"version": "g:2", "start": 2, "end": 3}]}]}

    data: [DONE]

An event has the tokens since the one before. `weight_versions` comes with the last one, and covers all tokens of the
response. `text` leaves out special tokens and the stop string; `token_ids` has them. finish_reason is stop (one of
stop_token_ids, a stop string, or an end-of-sequence token: the tokenizer's and all of the model's
generation_config.json), length, or abort. An error is {"error": {"message": "...", "code": 400}}, as an
event or as the body of another status.

The salt keeps prefixes that older weights computed out of a request: vLLM shares cached blocks among requests with the
same salt only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rljob_api.errors import UserError
from rljob_api.manifest.roles import Sampling
from rljob_api.wire import contract
from rljob_api.wire.scores import list_likeliest
from rljob_trainer.episodes.types import Completion, told_dtype

PATH = "/inference/v1/generate"

_STREAM_INTERVAL = 32
"""Tokens per event. Each one costs vLLM's server about as much as a token; few show progress as well as many."""
_UNKNOWN_LOGPROB = -9999.0
"""What vLLM writes for a log-prob that is not a number."""


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str | None
    logprobs: _Logprobs | None
    token_ids: list[int] | None
    weight_versions: list[_Span] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)
"""It makes no objects of what is never read: an event has ten times the bytes of its ids and log-probs."""


class UnusableResponseError(ValueError):
    """The response cannot be trained on; another attempt can help."""


class RejectedPromptError(UserError):
    """vLLM refused the request, and would refuse it again."""


def build_payload(
    token_ids: list[int], sampling: Sampling, seed: int, key: str, special_ids: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the request for one sample with the weights `key`. One request per sample: scoring starts as soon as a
    sample ends. vLLM batches them, and its prefix cache computes a common prompt once.

    `special_ids`: of special tokens by text. Such a text in `stop` stands for its token, since vLLM looks for texts in
    the answer without special tokens."""
    special = special_ids or {}
    return {
        "model": contract.SERVED_MODEL_NAME,
        "token_ids": token_ids,
        "stream": True,
        "output_mode": "text",
        "cache_salt": key,
        "sampling_params": {
            "max_tokens": sampling.answer_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": [text for text in sampling.stop if text not in special],
            "stop_token_ids": [special[text] for text in sampling.stop if text in special],
            "seed": seed,
            "logprobs": 0,
            "stream_interval": _STREAM_INTERVAL,
        },
    }


def build_score_payload(token_ids: Sequence[int], key: str, top_k: int) -> dict[str, Any]:
    """Return the request for the log-probs of a prompt and of the `top_k` likeliest tokens at each of its own, at
    temperature 1. Its answer is not streamed:

    {"choices": [...], "prompt_logprobs": [null, {"2": {"logprob": -0.1, "rank": 1}}]}"""
    return {
        "model": contract.SERVED_MODEL_NAME,
        "token_ids": list(token_ids),
        "cache_salt": key,
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k},
    }


def read_scores(body: Any, token_ids: Sequence[int], top_k: int) -> NDArray[Any]:  # [tokens - 1]
    """Return the log-probs of a prompt's tokens but the first, which nothing predicts; with `top_k` records of
    told_dtype."""
    entries = body["prompt_logprobs"][1:]
    told = [each[str(token)]["logprob"] for each, token in zip(entries, token_ids[1:], strict=True)]
    if top_k:
        told = [(own, list_likeliest(each, top_k)) for own, each in zip(told, entries, strict=True)]
    return np.array(told, told_dtype(top_k))


@dataclass
class ResponseReader:
    """Collects the events of one response."""

    token_ids: list[int] = field(default_factory=list)
    """[sampled]"""
    logprobs: list[float] = field(default_factory=list)
    """[sampled]"""
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    versions: list[int] = field(default_factory=list)
    """[sampled] Known once the response has ended."""
    generation: str = ""

    def add_line(self, line: bytes) -> None:
        """Add one line of the stream. Raises UserError, UnusableResponseError and other ValueErrors."""
        name, _, text = line.strip().partition(b":")
        if name != b"data" or text.strip() == b"[DONE]":
            return
        event = _EVENTS.decode(text)
        if event.error is not None:
            raise_rejection(event.error.get("code", 0), str(event.error.get("message", text)))
            raise UnusableResponseError(f"vLLM failed: {str(event.error)[:500]}")
        for choice in event.choices:
            self._add(choice)

    def _add(self, choice: _Choice) -> None:
        token_ids = choice.token_ids or []
        logprobs = [entry.logprob for entry in (choice.logprobs and choice.logprobs.content) or ()]
        if len(token_ids) != len(logprobs) or _UNKNOWN_LOGPROB in logprobs:
            raise UnusableResponseError(
                f"expected one log-prob per token, got {len(token_ids)} tokens and the log-probs {logprobs}"
            )
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.texts.append(choice.text)
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
            if self.finish_reason not in ("stop", "length"):
                raise UnusableResponseError(f"the completion ended with finish_reason {self.finish_reason}")
            self._add_versions(choice.weight_versions or [])

    def _add_versions(self, spans: list[_Span]) -> None:
        generations = set()
        for span in spans:
            generation, separator, version = span.version.rpartition(":")
            if not separator or not version.isdecimal():
                raise UnusableResponseError(f"generated with unknown weights {span.version!r}")
            generations.add(generation)
            self.versions += [int(version)] * (span.end - span.start)
        if len(generations) != 1 or len(self.versions) != len(self.token_ids):
            raise UnusableResponseError(
                f"expected a version of one generation for each of {len(self.token_ids)} tokens, got {spans}"
            )
        self.generation = generations.pop()

    def finish(self) -> Completion:
        if self.finish_reason is None:
            raise UnusableResponseError("the response ended before the completion")
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            text="".join(self.texts),
            truncated=self.finish_reason == "length",
            generation=self.generation,
        )


def raise_rejection(code: int, text: str) -> None:
    """Raise UserError if neither another replica nor another attempt can help."""
    if code == 401:
        raise UserError("401 Unauthorized: the rollout replica uses a different RLJOB_TOKEN")
    if code in (400, 422):
        remedy = "if the prompt is too long, set spec.data.maxPromptTokens or spec.rollout.maxModelLen"
        raise RejectedPromptError(f"vLLM rejected a prompt: {text[:500]} ({remedy})")


def read_context_length(body: Any) -> int | None:
    """Return the longest prompt with its answer, in tokens, that GET /v1/models names; None: it names none."""
    lengths = [model.get("max_model_len") for model in body["data"]]
    return min((length for length in lengths if length is not None), default=None)
