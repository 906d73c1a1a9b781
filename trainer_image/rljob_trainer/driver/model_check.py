"""Is this the model? Before the first step, the trainer and a rollout score the same fixed texts with the same weights.

    text --tokenizer--> ids --> trainer: log-probs, before the weights are published
                             '-> a rollout that serves them: ids of the text, and log-probs of the prompt

What makes them differ biases every update: a rope, a limit of scores or a scale that one of both computes otherwise,
numbers of another format, another tokenizer. Leaves what goes wrong later to step_warnings. Invariant: a difference
ends the job before its first step, with what in the job and in config.json may cause it.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJobSpec
from rljob_inputs.models.architectures import rope_parameters, text_config
from rljob_trainer.driver.ports import Trainer
from rljob_trainer.episodes.types import TrainRow
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.written_tokenizer import TEXTS

log = logging.getLogger(__name__)

MAX_TOKENS = 512
"""Length of the long prompt: the texts, again and again. An engine computes all logits of a prompt at once."""
_MIN_TOKENS = 2
LIMITS = {"float32": 2e-4, "float16": 0.05, "bfloat16": 0.15}
"""Limit of the mean difference of log-probs, by spec.trainer.dtype. On CPUs, tested models differ by 1e-7 to 2e-5 in
float32, and by 0.01 to 0.05 in bfloat16."""
_GPU_FLOAT32_LIMIT = 5e-3
"""Kernels of GPUs may multiply float32 in TF32."""
_APPROXIMATIONS = (
    *("--quantization", "-q", "--kv-cache-dtype", "--hf-overrides", "--dtype", "--tokenizer", "--load-format"),
    *("--model", "--config-format", "--rope"),
)
"""Arguments of vLLM with which it computes another model."""


class Difference(NamedTuple):
    mean: float
    """Mean absolute difference of log-probs."""
    largest: float
    first: int
    """Position of the first token whose difference is above the limit."""


@dataclass(frozen=True)
class ModelCheck:
    spec: RLJobSpec
    config: Mapping[str, Any]
    """config.json"""
    tokenizer: Any
    context_length: int | None
    """Context of the rollouts, in tokens."""

    async def score(self, trainer: Trainer) -> list[NDArray[np.float32]]:
        """Return the trainer's log-probs of each text's tokens but the first."""
        scores = await trainer.score([as_row(ids) for ids in self._prompts()])
        return [values[1:] for values in scores]

    async def compare(self, trained: Sequence[NDArray[np.float32]], rollouts: RolloutClient) -> None:
        """Raise UserError if a rollout reads or computes the texts otherwise."""
        served = await asyncio.gather(*(rollouts.tokenize(text) for text in TEXTS))
        for text, theirs, ours in zip(TEXTS, served, self._encode(TEXTS), strict=True):
            if theirs is not None and theirs != ours:
                raise UserError(
                    f"the rollouts' tokenizer is not that of spec.model: {text[:20]!r} has the ids {theirs[:8]} there, "
                    f"and {ours[:8]} here; {_describe(self.spec, self.config)}"
                )
        scores = await asyncio.gather(*(rollouts.score(ids) for ids in self._prompts()))
        if any(values is None for values in scores):
            log.warning(
                "vLLM gives no log-probs of prompts, so nothing shows that rollouts compute the trainer's model"
            )
            return
        limit = find_limit(self.spec)
        found = measure(trained, [values for values in scores if values is not None], limit)
        log.info("trainer and rollouts differ by %.2g in log-probs of fixed texts (at most %g)", found.mean, limit)
        if not found.mean <= limit:
            raise UserError(
                "the trainer and the rollouts compute different models of the same weights: the log-probs of fixed "
                f"texts differ by {found.mean:.2g} on average (at most {limit:g} in {self.spec.trainer.dtype}), by up "
                f"to {found.largest:.2g}, from token {found.first} on; {_describe(self.spec, self.config)}"
            )

    def _prompts(self) -> list[list[int]]:
        """Return a short and a long text: what depends on positions differs between the two."""
        limit = min(MAX_TOKENS, self.context_length - 1) if self.context_length else MAX_TOKENS
        short, *_ = self._encode(TEXTS[:1])
        joined = [number for ids in self._encode([f"{text}\n\n" for text in TEXTS]) for number in ids]
        long = joined * -(-MAX_TOKENS // max(1, len(joined)))
        return [ids for ids in (short[:limit], long[:limit]) if len(ids) >= _MIN_TOKENS]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return found


def as_row(ids: Sequence[int]) -> TrainRow:
    nothing = np.zeros(len(ids), np.float32)
    return TrainRow(
        token_ids=np.array(ids, np.int32),
        loss_mask=np.arange(len(ids)) > 0,
        rollout_logprobs=nothing,
        advantages=nothing,
        versions=nothing.astype(np.int32),
    )


def find_limit(spec: RLJobSpec) -> float:
    """Return the largest mean difference that the number format explains."""
    is_exact = spec.trainer.dtype == "float32" and spec.rollout.gpus_per_replica
    return _GPU_FLOAT32_LIMIT if is_exact else LIMITS[spec.trainer.dtype]


def measure(
    some: Sequence[NDArray[np.float32]], others: Sequence[NDArray[np.float32]], limit: float
) -> Difference:  # [texts], each [tokens - 1]
    """Return how log-probs differ. A number that is not finite makes the mean one, too."""
    apart = [np.abs(a - b) for a, b in zip(some, others, strict=True)]
    all_apart = np.concatenate(apart)
    above = [int(np.flatnonzero(~(each <= limit))[0]) + 1 for each in apart if (~(each <= limit)).any()]
    return Difference(float(all_apart.mean()), float(all_apart.max()), min(above, default=0))


def find_causes(spec: RLJobSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what may make rollouts compute another model than the trainer, the likeliest first."""
    if given := [each for each in spec.rollout.extra_args if each.startswith(_APPROXIMATIONS)]:
        yield f"spec.rollout.extraArgs has {', '.join(given)}: remove it"
    if "quantization_config" in config:
        yield "the model is quantized (quantization_config): use it in bfloat16, float16 or float32"
    text = text_config(config)
    for rope in rope_parameters(text):
        if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
            yield f"its rope is of the type {kind}: set spec.rollout.maxModelLen to the length it was trained for"
    if text.get("attn_logit_softcapping"):
        yield "it limits its attention scores (attn_logit_softcapping): set spec.trainer.attention to eager"
    if text.get("sliding_window"):
        yield f"it has windows of {text['sliding_window']} tokens (sliding_window): set spec.trainer.attention to eager"
    if spec.model.trust_remote_code:
        yield "its code is its own (spec.model.trustRemoteCode), and vLLM's is another"


def _describe(spec: RLJobSpec, config: Mapping[str, Any]) -> str:
    causes = list(dict.fromkeys(find_causes(spec, config)))
    if not causes:
        names = ", ".join(config.get("architectures") or [])
        return (
            f"transformers and vLLM compute {names} otherwise: use another model, or trainer.dtype: float32 to compare"
        )
    return f"likely causes: {'; '.join(causes)}"
