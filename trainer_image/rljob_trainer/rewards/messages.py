"""Requests to rewards and their responses: one sample or one group, in RLJob's protocol or another project's. Pure.

Invariant: a response gives each sample one result, or invalid results with a reason if it breaks the protocol.

A NeMo Gym resources server gets the row with the policy's answer (POST /verify), and returns the reward. The body has
the columns of the row, `responses_create_params` with the prompt, and `response`, an answer of OpenAI's Responses API
with all that followed the prompt: reasoning, text and calls of tools are items of their own, as model servers of NeMo
Gym write them. The server sends all of it back, with `reward` and its own fields.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from rljob_api.functions.values import content_text
from rljob_api.wire.base import InvalidReason, Message
from rljob_api.wire.contract import MAX_COMPONENTS, MAX_RESULT_BYTES, UrlPath
from rljob_api.wire.scores import GroupRequest, GroupResult, Part, Rendered, ScoreRequest, ScoreResult
from rljob_inputs.score_requests import Decoder, list_columns, render
from rljob_trainer.conversation.reasoning import END, START, strip_marks

_MAX_RESPONSE_BYTES_PER_SAMPLE = 2 * MAX_RESULT_BYTES
"""A result with its id, version and message."""
_LOGPROB_BYTES = 6
"""fp32 in base64."""
_MAX_ECHO = 6
"""Bytes of a response for a byte that was sent: as \\u000a."""


class RewardCall:
    """One request to a reward. Retries and hedges send the same one."""

    def __init__(
        self,
        request: ScoreRequest | GroupRequest,
        protocol: Literal["rljob", "openrlhf", "nemoGym"] = "rljob",
        decoder: Decoder | None = None,
    ) -> None:
        """`decoder`: for texts with special tokens."""
        self.request, self.protocol, self.decoder, self.lane = request, protocol, decoder, request.lane
        if isinstance(request, GroupRequest):
            self.path, self.samples = UrlPath.SCORE_GROUP.value, request.samples
            self.is_short = request.results is not None  # the second half of sampleThenGroup
        else:
            self.path, self.samples, self.is_short = UrlPath.SCORE.value, [request], False
        self.num_results = len(self.samples)

    @property
    def max_response_bytes(self) -> int:
        # A resources server of NeMo Gym sends the request back, perhaps with escapes.
        echoed = _MAX_ECHO * len(self.encode()) if self.protocol == "nemoGym" else 0
        num_tokens = sum(len(segment.token_ids) for each in self.samples for segment in each.segments or ())
        return _MAX_RESPONSE_BYTES_PER_SAMPLE * len(self.samples) + _LOGPROB_BYTES * num_tokens + echoed

    def payload(self, reads: Collection[Part] = ()) -> dict[str, Any]:
        """Return the JSON of the body, with the parts that the server reads."""
        if self.protocol == "rljob":
            ids = set() if "tokens" in reads else {"prompt_ids", "completion_ids"}
            segments = () if "segments" in reads else ("segments",)
            whole: Any = ids if "whole" in reads else True
            steps = () if "steps" in reads else ("finished_steps", "total_steps")
            excluded: Any = {**dict.fromkeys((*ids, *segments, *steps), True), **({"whole": whole} if whole else {})}
            request, is_group = self.request, isinstance(self.request, GroupRequest)
            if "rendered" in reads:  # texts that are made of token ids
                samples = [sample.model_copy(update={"rendered": self._render(sample)}) for sample in self.samples]
                request = self.request.model_copy(update={"samples": samples}) if is_group else samples[0]
            return request.model_dump(mode="json", exclude={"samples": {"__all__": excluded}} if is_group else excluded)
        if self.protocol == "nemoGym":
            return build_body(self.samples[0])
        texts = [self._render(sample) for sample in self.samples]
        return {
            "query": [text.query for text in texts],
            "prompts": [text.prompt for text in texts],
            "labels": [sample.ground_truth for sample in self.samples],
        }

    def _render(self, sample: ScoreRequest) -> Rendered:
        rendered = render(sample, self.decoder) if self.decoder is not None else None
        if rendered is None:
            raise ValueError(f"the sample {sample.id} has no token ids, so its text with special tokens is unknown")
        return rendered

    def encode(self, reads: Collection[Part] = ()) -> bytes:
        """Return the body. Half surrogate pairs, which UTF-8 cannot encode, become question marks.

        Raise ValueError for data that has no JSON form, such as lists nested too deeply.
        """
        try:
            return json.dumps(self.payload(reads), ensure_ascii=False).encode("utf-8", "replace")
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error

    def read(self, text: str, seconds: float) -> list[ScoreResult]:
        """Return the results of a response with status 200; invalid ones if it breaks the protocol.  [samples]"""
        try:
            if self.protocol == "nemoGym":
                reward, components = read_reward(text, self.payload())
                result = _read_reward(self.samples[0].id, reward, None, seconds)
                return [result.model_copy(update={"components": components}) if result.valid else result]
            return self._parse_openrlhf(text, seconds) if self.protocol == "openrlhf" else self._parse(text)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            return self.fail(InvalidReason.BAD_RETURN, f"invalid response {text[:200]}: {error}", seconds)

    def _parse(self, text: str) -> list[ScoreResult]:
        if isinstance(self.request, GroupRequest):
            group = GroupResult.model_validate_json(text)
            if group.id != self.request.id:
                raise ValueError(f"it is for {group.id}")
            results = group.results
        else:
            results = [ScoreResult.model_validate_json(text)]
        ids = [result.id for result in results]
        if ids != [sample.id for sample in self.samples]:
            raise ValueError(f"it is for the samples {', '.join(ids)}")
        for result in results:
            for name, value in result.components.items():
                if not math.isfinite(value):  # Python's JSON parsers accept NaN and Infinity
                    raise ValueError(f"component {name} of {result.id} is {value}; omit it, or return a finite number")
        return results

    def _parse_openrlhf(self, text: str, seconds: float) -> list[ScoreResult]:
        """Parse `{"rewards": [0.5, ...]}`: one number per sample, in lists of any depth. An `error` next to them, for
        all samples or in a list with one per sample, makes them invalid: a server that failed often returns zeros."""
        answer = json.loads(text)
        rewards = _flatten(answer["rewards"])
        if len(rewards) != len(self.samples):
            raise ValueError(f"got {len(rewards)}")
        given = answer.get("error")
        errors = given if isinstance(given, list) and len(given) == len(rewards) else [given] * len(rewards)
        return [
            _read_reward(sample.id, number, error, seconds)
            for sample, number, error in zip(self.samples, rewards, errors, strict=True)
        ]

    def fail(self, reason: InvalidReason, message: str, seconds: float = 0.0) -> list[ScoreResult]:
        """Return the same invalid result for each sample.  [samples]"""
        return [invalid(sample.id, reason, message, seconds) for sample in self.samples]


def invalid(request_id: str, reason: InvalidReason, message: str, seconds: float) -> ScoreResult:
    return ScoreResult(id=request_id, valid=False, reason=reason, message=message[:2000], execute_seconds=seconds)


def _read_reward(sample_id: str, number: float, error: Any, seconds: float) -> ScoreResult:
    if error:
        shown = error if isinstance(error, str) else json.dumps(error, ensure_ascii=False)
        return invalid(sample_id, InvalidReason.EXCEPTION, f"the endpoint returned an error: {shown}", seconds)
    if not math.isfinite(number):
        return invalid(sample_id, InvalidReason.NOT_FINITE, f"reward is {number}", seconds)
    return ScoreResult(id=sample_id, valid=True, score=number, execute_seconds=seconds)


def _flatten(value: Any) -> list[float]:
    return [number for each in value for number in _flatten(each)] if isinstance(value, list) else [float(value)]


_PROMPT, _RESPONSE = "responses_create_params", "response"
_COMPONENTS = "reward_components"


def build_body(sample: ScoreRequest) -> dict[str, Any]:
    """Return the body. A column `responses_create_params` keeps its other fields, such as tools."""
    columns = list_columns(sample)
    given = columns.get(_PROMPT)
    prompt = sample.prompt if isinstance(sample.prompt, str) else [dict(message) for message in sample.prompt]
    answer = [{"role": "assistant", "content": sample.completion}]
    messages = answer if sample.whole is None else sample.whole.messages
    response = {
        "id": sample.id,
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "output": [item for number, message in enumerate(messages) for item in _write_items(message, number)],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    params = {**(given if isinstance(given, Mapping) else {}), "input": prompt}
    return {**columns, _PROMPT: params, _RESPONSE: response}


def _write_items(message: Message, number: int) -> Iterator[dict[str, Any]]:
    text, role = content_text(message.get("content")), message["role"]
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": text}
        return
    if role != "assistant":
        yield {"type": "message", "role": role, "content": text}
        return
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls") or []
    if not reasoning and (END in text or text.lstrip().startswith(START)):  # the prompt may have ended with <think>
        reasoning, _, text = text.partition(END)
        text = text.lstrip()
    if reasoning:
        summary = [{"type": "summary_text", "text": strip_marks(reasoning)}]
        yield {"id": f"rs_{number}", "type": "reasoning", "summary": summary}
    if text or not calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        own = {"id": f"msg_{number}", "type": "message", "role": role, "status": "completed"}
        yield {**own, "content": content}
    for call in calls:
        yield {"type": "function_call", "call_id": call["id"], "status": "completed", **call["function"]}


def read_reward(text: str, sent: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """Return the reward, and the numbers that the server added to what was `sent`. Raise ValueError, KeyError or
    TypeError for another response."""
    answer = json.loads(text)
    reward = answer["reward"]
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise TypeError(f"reward must be a number, got {reward!r:.80}")
    parts = answer.get(_COMPONENTS)
    added = {**answer, **parts} if isinstance(parts, Mapping) else answer
    numbers = ((name, value) for name, value in added.items() if name != "reward" and name not in sent)
    components = {name: float(value) for name, value in numbers if isinstance(value, int | float)}
    finite = {name: value for name, value in components.items() if math.isfinite(value)}
    return float(reward), dict(list(finite.items())[:MAX_COMPONENTS])
