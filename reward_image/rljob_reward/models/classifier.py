"""A reward model: a text or a conversation to vLLM's /classify, one of its outputs to a score.

vLLM batches the requests in flight by itself, up to its token budget. Activations are applied here, to the raw logits,
so that none is a matter of vLLM's defaults. Invariant: a text loses tokens only where tooLong says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.scorers import ModelReward
from rljob_api.wire.protocol import InvalidReason, ScoreRequest
from rljob_reward.models import vllm_sidecar as beside
from rljob_reward.models.metrics import CallMetrics
from rljob_reward.models.model_slots import NoScoreError, OpenGate, Progress, Score
from rljob_reward.models.texts import describe, turns_of
from rljob_reward.models.upstream import Asker
from rljob_reward.models.vllm_sidecar import Beside
from rljob_reward.results import StartupReport

_SIDES = {"truncateLeft": "left", "truncateRight": "right"}
_WHOLE = -1
"""vLLM's truncate_prompt_tokens: to the model's own length."""
_WARM_UP_SECONDS = 600.0


class ModelCaller:
    """Asks the classifier."""

    def __init__(self, model: ModelReward, metrics: CallMetrics) -> None:
        self._model = model
        self._metrics = metrics
        self.gate = OpenGate()
        self._beside = Beside()
        self._asker = Asker(self._beside.session, f"{beside.URL}/classify", self, name="the model's vLLM")

    @property
    def can_serve(self) -> bool:
        return self._beside.is_up

    @property
    def enforces_timeout(self) -> bool:
        return False

    async def start(self) -> StartupReport:
        """One question tells how many outputs there are, and whether the model takes such questions at all."""
        await self._beside.wait()
        probe = ScoreRequest(id="warm-up", prompt="Hello", completion="Hello")
        deadline = time.monotonic() + _WARM_UP_SECONDS
        try:
            logits = await self._ask(probe, Progress(deadline))
        except NoScoreError as error:
            raise UserError(f"model cannot be asked: {error}") from error
        if problem := find_label_problem(self._model.label, len(logits)):
            raise UserError(f"model.label {problem}")
        return StartupReport(entrypoint=self._model.source, signature="model")

    async def call(self, body: bytes, progress: Progress) -> list[Score]:
        logits = await self._ask(ScoreRequest.model_validate_json(body), progress)
        if find_label_problem(self._model.label, len(logits)):
            raise NoScoreError(InvalidReason.BAD_RETURN, f"the model gave {len(logits)} outputs")
        value = activate(logits, self._model.label or 0, self._model.activation)
        if not math.isfinite(value):
            raise NoScoreError(InvalidReason.NOT_FINITE, f"the model gave {value}")
        return [Score(value)]

    async def _ask(self, request: ScoreRequest, progress: Progress) -> list[float]:
        answer = await self._asker.post(self._build_payload(request), progress)
        try:
            logits = [float(value) for value in answer["data"][0]["probs"]]
            tokens = float(answer["usage"]["prompt_tokens"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise NoScoreError(InvalidReason.BAD_RETURN, f"no classification: {describe(answer)}") from None
        self._metrics.record_tokens(tokens, 0)
        return logits

    def _build_payload(self, request: ScoreRequest) -> dict[str, Any]:
        payload: dict[str, Any] = {"model": beside.SERVED_MODEL_NAME, "use_activation": False}
        if self._model.too_long in _SIDES:
            payload |= {"truncate_prompt_tokens": _WHOLE, "truncation_side": _SIDES[self._model.too_long]}
        turns = turns_of(request.prompt)
        if self._model.template == "text":
            prompt = "\n".join(str(turn.get("content") or "") for turn in turns)
            return payload | {"input": f"{prompt}{request.completion}"}
        return payload | {"messages": [*turns, {"role": "assistant", "content": request.completion}]}

    async def close(self) -> None:
        await self._beside.close()

    def record_wait(self, limit: str, seconds: float) -> None:
        self._metrics.record_wait(limit, seconds)

    def record_call(self, outcome: str) -> None:
        self._metrics.record_call(outcome)

    def pause(self, seconds: float) -> None:
        """vLLM of our own has no limits."""

    async def enter_again(self) -> None:
        pass


def find_label_problem(label: int | None, num_outputs: int) -> str:
    """Why there is no such output; empty where there is."""
    if label is None:
        return "" if num_outputs == 1 else f"must be set: the model has {num_outputs} outputs, 0 to {num_outputs - 1}"
    return "" if label < num_outputs else f"must be at most {num_outputs - 1}, got {label}"


def activate(logits: Sequence[float], label: int, activation: str) -> float:
    """The score of raw logits."""
    logit = logits[label]
    if activation == "sigmoid":
        return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
    if activation == "softmax":
        most = max(logits)
        return math.exp(logit - most) / math.fsum(math.exp(other - most) for other in logits)
    return logit
