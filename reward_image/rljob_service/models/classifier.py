"""A reward model: posts a text or a conversation to vLLM's /classify, and returns one of its outputs as the score.

vLLM batches the requests in flight. Activations are applied here to the raw logits, so that they do not depend on
vLLM's defaults. Invariant: tokens are cut only if tooLong says so.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rljob_api.errors import RLJobError, UserError
from rljob_api.manifest.services.models import ModelReward
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreRequest
from rljob_service.models import vllm_sidecar
from rljob_service.models.backend import ModelBackend
from rljob_service.models.execution import ExecutionProgress, NoScoreError, Score
from rljob_service.models.metrics import UpstreamMetrics
from rljob_service.models.rate_limiter import RateLimiter
from rljob_service.models.texts import completion_messages, completion_text, content_of, describe, to_messages
from rljob_service.models.upstream import UpstreamClient
from rljob_service.results import StartupReport

_TRUNCATION_SIDES = {"truncateLeft": "left", "truncateRight": "right"}
_MODEL_LENGTH = -1
"""vLLM's truncate_prompt_tokens: truncate to the model's length."""


class Classifier(ModelBackend):
    """A sequence classifier on vLLM."""

    def __init__(
        self, model: ModelReward, metrics: UpstreamMetrics, on_fatal_error: Callable[[RLJobError], None]
    ) -> None:
        super().__init__(RateLimiter(), uses_vllm=True)
        self._model = model
        self._on_fatal_error = on_fatal_error
        self.upstream = UpstreamClient(
            self._session,
            f"{'' if self._engines else vllm_sidecar.URL}/classify",
            self.limiter,
            metrics,
            name="the model's vLLM",
            engines=self._engines,
        )

    async def start(self) -> StartupReport:
        """Check that the model can classify, and how many outputs it has; in the trainer's Pods, its first answer
        tells."""
        if self._engines is not None:
            self._engines.start()
        else:
            probe = ScoreRequest(id="warm-up", prompt="Hello", completion="Hello")
            logits = await self._warm_up(partial(self._classify, probe), "model")
            if problem := find_label_problem(self._model.label, len(logits)):
                raise UserError(f"model.label {problem}")
        return StartupReport(entrypoint=self._model.source, signature="model", reads=["whole"])

    async def execute(self, body: bytes, progress: ExecutionProgress) -> list[Score]:
        logits = await self._classify(ScoreRequest.model_validate_json(body), progress)
        if problem := find_label_problem(self._model.label, len(logits)):
            if self._engines is not None:
                self._on_fatal_error(UserError(f"model.label {problem}"))
            raise NoScoreError(InvalidReason.BAD_RETURN, f"the model returned {len(logits)} outputs")
        value = activate(logits, self._model.label or 0, self._model.activation)
        if not math.isfinite(value):
            raise NoScoreError(InvalidReason.NOT_FINITE, f"the model returned {value}")
        return [Score(value)]

    async def close(self) -> None:
        self.upstream.close()
        await super().close()

    async def _classify(self, request: ScoreRequest, progress: ExecutionProgress) -> list[float]:
        answer = await self.upstream.post(self._build_payload(request), progress)
        try:
            logits = [float(value) for value in answer["data"][0]["probs"]]
        except (KeyError, IndexError, TypeError, ValueError):
            raise NoScoreError(InvalidReason.BAD_RETURN, f"not a classification: {describe(answer)}") from None
        return logits

    def _build_payload(self, request: ScoreRequest) -> dict[str, Any]:
        payload: dict[str, Any] = {"model": vllm_sidecar.SERVED_MODEL_NAME, "use_activation": False}
        if side := _TRUNCATION_SIDES.get(self._model.too_long):
            payload |= {"truncate_prompt_tokens": _MODEL_LENGTH, "truncation_side": side}
        messages = to_messages(request.prompt)
        if self._model.template == "text":
            prompt = "\n".join(map(content_of, messages))
            return payload | {"input": f"{prompt}{completion_text(request)}"}
        if self._model.chat_template_arguments:
            payload["chat_template_kwargs"] = self._model.chat_template_arguments
        return payload | {"messages": [*messages, *completion_messages(request)]}


def find_label_problem(label: int | None, num_outputs: int) -> str:
    """Return why there is no such output; empty if it exists."""
    if label is None:
        return "" if num_outputs == 1 else f"must be set: the model has {num_outputs} outputs, 0 to {num_outputs - 1}"
    return "" if label < num_outputs else f"must be at most {num_outputs - 1}, got {label}"


def activate(logits: Sequence[float], label: int, activation: str) -> float:
    logit = logits[label]
    if activation == "sigmoid":
        return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
    if activation == "softmax":
        top = max(logits)
        return math.exp(logit - top) / math.fsum(math.exp(other - top) for other in logits)
    return logit
