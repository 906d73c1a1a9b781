"""The answers of the engine, as they arrive: what reading one costs the loop, by its tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import numpy as np

from rljob_trainer.episodes.types import empty_segment
from rljob_trainer.replicas.generate import ResponseReader

_PER_EVENT = 32
"""As build_payload asks for."""


def measure_completion(num_tokens: int) -> dict[str, float]:
    """Return the CPU time of one completion in all, and its longest piece, in ms."""
    lines = list(_write_lines(num_tokens))
    reader, pieces, segment = ResponseReader(), [], empty_segment()

    def timed(since: float) -> None:
        pieces.append(time.process_time() - since)

    for line in lines:
        since = time.process_time()
        reader.add_line(line)
        timed(since)
    since = time.process_time()
    completion = reader.finish()
    timed(since)
    since = time.process_time()
    segment.append_sampled(completion, 0)
    timed(since)
    return {"ms": sum(pieces) * 1e3, "longest_ms": max(pieces) * 1e3, "us_per_token": sum(pieces) * 1e6 / num_tokens}


def _write_lines(num_tokens: int) -> Iterator[bytes]:
    generator = np.random.default_rng(0)
    token_ids = generator.integers(0, 150_000, num_tokens).tolist()
    logprobs = (-generator.exponential(1.0, num_tokens)).astype(np.float32).tolist()
    for start in range(0, num_tokens, _PER_EVENT):
        end = min(num_tokens, start + _PER_EVENT)
        is_last = end == num_tokens
        entries = [
            {"token": f"token_id:{i}", "logprob": value, "bytes": None, "top_logprobs": []}
            for i, value in zip(token_ids[start:end], logprobs[start:end], strict=True)
        ]
        choice = {
            "index": 0,
            "text": " word" * (end - start),
            "token_ids": token_ids[start:end],
            "logprobs": {"content": entries},
            "finish_reason": "stop" if is_last else None,
            "weight_versions": [{"version": "g:3", "start": 0, "end": num_tokens}] if is_last else None,
        }
        event = {"request_id": "r", "choices": [choice], "usage": None}
        yield f"data: {json.dumps(event)}\n".encode()
