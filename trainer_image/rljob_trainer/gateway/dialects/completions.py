"""POST /v1/completions: OpenAI's completions, of a text or of token ids. Pure.

No chat template and no tools: the prompt is what the policy continues, and the text of the answer is all that it
sampled, without special tokens. Without max_tokens the job's limit holds, not the 16 tokens of OpenAI's server.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rljob_trainer.gateway.dialects import fields
from rljob_trainer.gateway.types import ModelAnswer, ModelRequest


class Completions(fields.OpenAIErrors):
    """The dialect of /v1/completions."""

    path = "/v1/completions"
    reads = frozenset({"model", "prompt", "max_tokens", "stop", "stream", "stream_options", "logprobs"})

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        return ModelRequest(
            model=fields.read_model(body),
            prompt=_read_prompt(body.get("prompt")),
            max_tokens=fields.read_count(body.get("max_tokens"), "max_tokens"),
            stop=fields.read_stop(body.get("stop"), "stop"),
            stream=fields.read_flag(body.get("stream"), "stream"),
            with_usage=fields.asks_for_usage(body),
            num_logprobs=fields.read_count(body.get("logprobs"), "logprobs", minimum=0),
        )

    def write(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
        return {**_write_chunk(request, answer, [_write_choice(request, answer)]), "usage": fields.write_usage(answer)}

    def events(self, request: ModelRequest, answer: ModelAnswer) -> Sequence[bytes]:
        choice = _write_choice(request, answer)
        end = {**choice, "text": "", "logprobs": None}
        chunks = [
            _write_chunk(request, answer, [{**choice, "finish_reason": None}]),
            _write_chunk(request, answer, [end]),
        ]
        if request.with_usage:
            chunks.append({**_write_chunk(request, answer, []), "usage": fields.write_usage(answer)})
        return [*map(fields.write_event, chunks), fields.DONE]


def _read_prompt(prompt: Any) -> str | list[int]:
    """Return the text or the token ids. A list of one prompt is that prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise fields.refuse("prompt", "required: a text or a list of token ids", "missing_required_parameter")
    if any(isinstance(entry, str | list) for entry in prompt):
        raise fields.refuse("prompt", "several prompts are not supported; send one request per prompt")
    for index, token_id in enumerate(prompt):
        fields.read_count(token_id, f"prompt[{index}]", minimum=0)
    return prompt


def _write_chunk(request: ModelRequest, answer: ModelAnswer, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": "text_completion",
        "created": answer.created,
        "model": request.model,
        "choices": choices,
    }


def _write_choice(request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
    return {
        "index": 0,
        "text": answer.completion.text,
        "logprobs": None if request.num_logprobs is None else _write_logprobs(answer, request.num_logprobs),
        "finish_reason": "length" if answer.completion.truncated else "stop",
    }


def _write_logprobs(answer: ModelAnswer, num_top: int) -> dict[str, Any]:
    """Return the log-probs. `num_top`: more than 0 asks for the likeliest tokens; only the sampled one is known."""
    tokens, logprobs = answer.token_texts, answer.completion.logprobs
    offsets = list(accumulate(map(len, tokens[:-1]), initial=0))
    top = [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)] if num_top else None
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}
