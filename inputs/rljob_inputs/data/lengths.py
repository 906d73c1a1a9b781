"""How long a prompt may be, and a table of how long they are. Pure.

Invariant: every completion of an admitted prompt fits into the rollouts, whatever its length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api.manifest.evaluation import HeldOutSet
from rljob_api.manifest.job import RLJobSpec
from rljob_inputs.findings import LengthTable


@dataclass(frozen=True)
class PromptLimit:
    """The longest prompt that is used, in tokens. None: any."""

    num_tokens: int | None = None
    reason: str = ""

    def admits(self, num_tokens: int) -> bool:
        return self.num_tokens is None or num_tokens <= self.num_tokens


def find_limit(
    spec: RLJobSpec, held_out: HeldOutSet | None, context_length: int | None, *, is_given: bool = False
) -> PromptLimit:
    """Return the limit of an evaluation set; None: of data.train. `spec` is resolved. `context_length` is the model's,
    None if it is unknown. `is_given`: the prompt is of a given conversation, which needs no room to answer."""
    max_tokens, name = spec.rollout.sampling.answer_tokens, "rollout.sampling.maxTokens"
    if is_given:
        max_tokens, name = 1, "the answer, at least"
    sampling = held_out.sampling if held_out else None
    if held_out is not None and sampling is not None and sampling.max_tokens != max_tokens:
        max_tokens, name = sampling.answer_tokens, f"{held_out.path.removeprefix('spec.')}.sampling.maxTokens"
    limits: list[PromptLimit] = []
    if spec.data.max_prompt_tokens is not None:
        limits.append(PromptLimit(spec.data.max_prompt_tokens, "data.maxPromptTokens"))
    if spec.rollout.max_model_len is not None:
        reason = f"rollout.maxModelLen {spec.rollout.max_model_len} - {name} {max_tokens}"
        limits.append(PromptLimit(spec.rollout.max_model_len - max_tokens, reason))
    elif context_length is not None:
        reason = f"the model's context {context_length} - {name} {max_tokens}"
        limits.append(PromptLimit(context_length - max_tokens, reason))
    return min(limits, key=lambda limit: limit.num_tokens or 0, default=PromptLimit())


def measure(
    lengths: Sequence[int], path: str, num_rows: int, limit: PromptLimit, *, is_whole: bool = True
) -> LengthTable:
    """Return the table of at least one length."""
    import numpy as np  # of the extra data

    values = np.asarray(lengths)
    return LengthTable(
        path=path,
        num_rows=num_rows,
        is_whole=is_whole,
        num_measured=len(lengths),
        min=int(values.min()),
        median=int(np.median(values)),
        p95=int(np.percentile(values, 95)),
        max=int(values.max()),
        limit=limit.num_tokens,
        limit_reason=limit.reason,
        num_too_long=sum(not limit.admits(length) for length in lengths),
    )
