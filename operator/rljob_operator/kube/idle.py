"""Which jobs are idle: their last reconcile wrote nothing, and nothing that it read has changed since.

A reconcile costs milliseconds of CPU, and most reconciles of a job only poll its driver. For an idle job that poll is
all that is done. Invariant: a job is idle only while a reconcile would observe the same state and, by its plan's
`valid_until`, write nothing. A change of its objects, of its namespace's policy, of a RewardModel that it references,
or of its driver's answer ends the idle state; so do the plan's deadline and MAX_IDLE_SECONDS.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.policy import POLICY_NAME
from rljob_core.backend import PROGRESS_POLL_SECONDS, DriverAnswer, Key, ObservedState, Owner, Plan
from rljob_core.kube.resources import POLICY, RLJOB
from rljob_core.loop.reconcile import OnUnchanged
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import ObjectKey
from rljob_operator.kube.driver import find_driver
from rljob_operator.kube.driver_request import DriverEndpoint
from rljob_operator.kube.kept_status import keep_lasting

MAX_IDLE_SECONDS = 600
"""Reconciling is level-triggered: after this time a job is reconciled whatever the operator believes."""
_SPREAD_SECONDS = 300
"""Spreads the reconciles of jobs that became idle together."""


@dataclass(frozen=True, slots=True)
class _IdleState:
    seen_at: int
    """The cache's count of changes before the reconcile."""
    driver: DriverEndpoint | None
    answer: tuple[bytes, str]
    until: datetime


class IdleTracker:
    """Remembers the idle jobs. RewardModels are never idle."""

    def __init__(self, backend: KubernetesBackend) -> None:
        self._backend = backend
        self._idle: dict[Key, _IdleState] = {}

    async def idle_seconds(self, key: Key, now: datetime) -> float | None:
        """Return after which time to requeue an idle job; None: reconcile it now."""
        state = self._idle.get(key)
        if state is not None and await self._is_unchanged(key, state, now):
            return PROGRESS_POLL_SECONDS if state.driver else (state.until - now).total_seconds()
        self._idle.pop(key, None)
        return None

    def track(self, key: Key, now: datetime) -> OnUnchanged:
        """Return the `on_unchanged` of a reconcile that starts now."""
        seen_at = self._backend.cache.num_changes

        def on_unchanged(owner: Owner, observed: ObservedState, wanted: Plan[Any]) -> None:
            if not isinstance(owner, RLJob) or wanted.valid_until is None:
                return
            latest = now + timedelta(seconds=MAX_IDLE_SECONDS - hash(key) % _SPREAD_SECONDS)
            answer = _keep_lasting(DriverAnswer(observed.driver, observed.driver_problem))
            driver = find_driver(owner, observed)
            self._idle[key] = _IdleState(seen_at, driver, answer, min(latest, wanted.valid_until))

        return on_unchanged

    async def _is_unchanged(self, key: Key, state: _IdleState, now: datetime) -> bool:
        if now >= state.until:
            return False
        answer = await self._backend.get_driver_answer(state.driver, key)
        return _keep_lasting(answer) == state.answer and self._last_change(key) <= state.seen_at

    def _last_change(self, key: Key) -> int:
        """Return that of a job, of the policy of its namespace, and of the RewardModels that it references. A job that
        references others has changed."""
        cache, job = self._backend.cache, ObjectKey(RLJOB.kind, *key)
        policy = ObjectKey(POLICY.kind, key.namespace, POLICY_NAME)
        return max(map(cache.last_change, (job, policy, *cache.models_of(job))))


def _keep_lasting(answer: DriverAnswer) -> tuple[bytes, str]:
    return keep_lasting(answer.status) if answer.status else b"", answer.problem
