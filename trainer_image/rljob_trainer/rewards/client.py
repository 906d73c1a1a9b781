"""The client of one reward: a sample or a group to valid scores, or to invalid results with a reason."""

import json
import os

import aiohttp

from rljob_api.errors import UserError
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.contract import ENV_REWARD_TOKENS, ENV_TOKEN
from rljob_api.wire.scores import GroupRequest, ScoreRequest, ScoreResult
from rljob_inputs.score_requests import Decoder
from rljob_trainer.episodes.types import ScoredResult
from rljob_trainer.outages.registry import Outages
from rljob_trainer.replicas.http import auth_headers
from rljob_trainer.rewards.messages import RewardCall
from rljob_trainer.services.client import ServiceClient

_MAX_GROUPS = 65_536
"""Groups whose first request is known; far more than are under way."""


class RewardClient(ServiceClient[ScoreResult]):
    def __init__(
        self,
        reward: Reward,
        session: aiohttp.ClientSession,
        decoder: Decoder | None = None,
        *,
        index: int = 0,
        outages: Outages | None = None,
    ) -> None:
        """`decoder`: for rewards that read texts with special tokens. `index`: in spec.rewards."""
        super().__init__(
            reward,
            f"spec.rewards: {reward.name}",
            session,
            source=f"spec.rewards[{index}].{reward.kind or 'rewardModelRef'}",
            outages=outages,
            name=f"reward {reward.name}",
            url=reward.http.url if reward.http else "",
            headers={} if reward.http else auth_headers(_token_variable(reward)),  # never send a token elsewhere
            # The operator may scale these to zero, too.
            allow_empty=reward.reward_model_ref is not None,
            pins_version=reward.http is None,
            hedging=reward.hedging,
        )
        self.reward, self._decoder = reward, decoder
        self._protocol = reward.http.protocol if reward.http else "rljob"
        self.num_rescored = 0
        """Samples that were rescored because the reward's version changed in the middle of a step."""
        self._group_since: dict[str, float] = {}
        """By group, the oldest first."""

    def begin(self) -> None:
        """Start a collection, which one version scores."""
        if self.versions:
            self.versions.begin()

    def is_stale(self, result: ScoreResult) -> bool:
        return self.versions is not None and not self.versions.pin.accepts(result.version)

    async def score(self, request: ScoreRequest | GroupRequest) -> list[ScoredResult]:
        """Score the samples together.  [samples]  Raise UserError with failJob, TransientError without any response."""
        call = RewardCall(request, self._protocol, self._decoder)
        results, pending = await self.call(call, self._place(request))
        policy = self.reward.failure_policy
        for result in results:
            if not result.valid and policy.action == "failJob" and policy.score_of(result.reason) is None:
                raise UserError(
                    f"spec.rewards: {self.reward.name} returned no valid score ({result.reason}: {result.message}) and "
                    f"its failurePolicy.action is failJob"
                )
        latency, attempts = pending.seconds, pending.num_requests
        retries = max(0, attempts - 1)
        return [
            ScoredResult.model_construct(**dict(r), attempts=attempts, retries=retries, latency_seconds=latency)
            for r in results
        ]

    def _place(self, request: ScoreRequest | GroupRequest) -> float:
        """Return when the first request of the group arrived. A group trains when all its samples are scored, so they
        are sent together, before those of groups that came later."""
        group = request.id if isinstance(request, GroupRequest) else request.id.rpartition("/")[0]
        since = self._group_since.setdefault(group, self.replicas.now())
        if len(self._group_since) > _MAX_GROUPS:
            del self._group_since[next(iter(self._group_since))]
        return since

    def statistics(self) -> dict[str, float]:
        """Return the current value of each metric `rljob_reward_NAME`."""
        return super().statistics() | {
            "hedges": self.hedges.num_hedges if self.hedges else 0,
            "hedge_wins": self.hedges.num_wins if self.hedges else 0,
            "rescored": self.num_rescored,
        }

    def describe_wait(self) -> str:
        """Return the age of the oldest request and what is missing; empty if nothing is in flight."""
        return f"({self.reward.name}){self._describe_oldest()}" if self.in_flight else ""


def _token_variable(reward: Reward) -> str:
    """Return the environment variable with the token for this reward's servers: the job's, or a RewardModel's."""
    variables: dict[str, str] = json.loads(os.environ.get(ENV_REWARD_TOKENS) or "{}")
    variable = variables.get(reward.name, ENV_TOKEN)
    if variable != ENV_TOKEN and not os.environ.get(variable):
        raise UserError(
            f"spec.rewards: {reward.name}: {variable}, its token's variable in ${ENV_REWARD_TOKENS}, is not set; "
            "check that the Secret of its RewardModel exists"
        )
    return variable
