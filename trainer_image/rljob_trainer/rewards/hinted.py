"""The policy as its own teacher: it reads a hint that it did not see when it sampled. Self-distillation.

    student   prompt, answer, reply, answer, ...           as it was sampled, in one or more segments
    teacher   hint | prompt, answer, reply, answer, ...    log-probs of the same tokens after the hint

The rollouts compute them at the end of the episode, with the weights that they serve then: those that sampled it, or
newer ones if the schedule trains meanwhile. No other model is loaded. Leaves the text of the hint to
rljob_inputs.data.prompts. Invariant: the tokens of the episode are never encoded again.
"""

import base64
import time
from collections.abc import Sequence
from typing import Any, cast

import aiohttp
import numpy as np
from numpy.typing import NDArray

from rljob_api.manifest.job_sections import Data
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreResult, TokenSegment
from rljob_inputs.data.prompts import write_hint
from rljob_inputs.findings import InputError
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.rewards.groups import RewardClient
from rljob_trainer.rewards.messages import RewardCall
from rljob_trainer.services.messages import PendingRequest


class HintedPolicy(RewardClient):
    def __init__(
        self,
        rollouts: RolloutClient,
        data: Data,
        reward: Reward,
        session: aiohttp.ClientSession,
        tokenizer: Any,
        *,
        index: int,
        **options: Any,
    ) -> None:
        super().__init__(reward, session, tokenizer, index=index, **options)
        self._rollouts, self._data, self._tokenizer = rollouts, data, tokenizer
        self._field = f"spec.rewards[{index}].teacher.hint"
        self.health = rollouts.replicas.fleet.health

    async def _run_attempts(self, pending: PendingRequest[ScoreResult], since: float | None) -> list[ScoreResult]:
        """Ask the rollouts, which repeat what a lost replica had. A row without the columns is a failure of its own."""
        call, started = cast(RewardCall, pending.call), time.monotonic()
        pending.sent_at, pending.waits_for, pending.num_requests = started, "the rollouts", 1
        [request] = call.samples
        try:
            hint = write_hint(self._data, self.reward.hint or "", request, self._tokenizer, self._field)
        except InputError as error:
            return call.fail(InvalidReason.EXCEPTION, str(error))
        found = [await self._ask(hint, segment) for segment in request.segments or ()]
        seconds = time.monotonic() - started
        pending.num_executions, pending.execute_seconds = 1, seconds
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            message = (
                "the rollouts refuse the episode after the hint; see their answer in the log, and rollout.maxModelLen"
            )
            return call.fail(InvalidReason.EXCEPTION, message, seconds)
        # A token's number, of a record with topK, is finite as well.
        if not all(np.isfinite(each.view(np.float32)).all() for each in known):
            return call.fail(InvalidReason.NOT_FINITE, "the policy's log-probs after the hint are not finite")
        logprobs = [base64.b64encode(each.tobytes()).decode() for each in known]
        return [ScoreResult(id=request.id, valid=True, score=0.0, logprobs=logprobs, execute_seconds=seconds)]

    async def _ask(self, hint: Sequence[int], segment: TokenSegment) -> NDArray[Any] | None:  # [sampled]
        """Return the log-probs of the sampled tokens, as records with topK; None if vLLM refuses to compute them."""
        if not segment.sampled:
            return np.zeros(0, np.float32)
        ids = segment.token_ids[: segment.sampled[-1][1]]
        # A token that begins every text begins the hint.
        begins = self._tokenizer.bos_token_id is not None and hint[:1] == ids[:1] == [self._tokenizer.bos_token_id]
        scores = await self._rollouts.score([*hint, *ids[begins:]], self.reward.top_k)
        if scores is None:
            return None
        shift = len(scores) - len(ids)  # the first token of all has no log-prob
        return np.concatenate([scores[shift + start : shift + end] for start, end in segment.sampled])
