"""Which jobs are at rest: the last look at one wrote nothing, and nothing that it read is different now.

A look costs milliseconds of CPU and most of a job's looks are polls of its driver; at rest only the driver is asked.
Leaves looking to `reconcile`. Invariant: a job is left alone only while a look would read the very same world and,
by its plan's own word, do nothing. A change of its objects or of a RewardModel that it names, another answer of its
driver, the moment that the plan named, or MAX_REST_SECONDS end its rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from rljob_api.manifest.job import RLJob
from rljob_api.wire.protocol import DriverStatus
from rljob_operator.backend import JobKey, Observed, Plan
from rljob_operator.defaults import Defaults
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import OwnerKey
from rljob_operator.kube.driver import Driver
from rljob_operator.kube.resources import REWARD_MODEL, RLJOB
from rljob_operator.loop.reconcile import reconcile
from rljob_operator.plan.job import POLL_SECONDS

MAX_REST_SECONDS = 600
"""After this a job is looked at whatever is known of it: its world is level-triggered, and we may have defects."""
_SPREAD_SECONDS = 300
"""Jobs that came together are not all looked at again together."""


@dataclass(frozen=True, slots=True)
class _Rest:
    seen_at: int
    """The cache's count of changes before the look."""
    owners: tuple[OwnerKey, ...]
    """Whose objects it read."""
    driver: Driver | None
    said: DriverStatus | None
    until: datetime


class Resting:
    """Reconciles jobs that are not at rest, and remembers those that are."""

    def __init__(self, backend: KubernetesBackend) -> None:
        self._backend = backend
        self._at_rest: dict[JobKey, _Rest] = {}

    async def reconcile(self, key: JobKey, now: datetime, defaults: Defaults) -> float | None:
        """As reconcile.reconcile, which it asks unless the job is at rest."""
        rest = self._at_rest.get(key)
        if rest is not None and await self._holds(rest, now):
            return POLL_SECONDS if rest.driver else (rest.until - now).total_seconds()
        self._at_rest.pop(key, None)
        seen_at = self._backend.cache.num_changes

        def record(job: RLJob, observed: Observed, wanted: Plan) -> None:
            if wanted.holds_until is not None:
                self._at_rest[key] = self._rest(key, seen_at, job, observed, wanted.holds_until, now)

        return await reconcile(self._backend, key, now, defaults, on_nothing_written=record)

    async def _holds(self, rest: _Rest, now: datetime) -> bool:
        cache, driver = self._backend.cache, self._backend.driver
        if now >= rest.until or _without_demand(await driver.ask(rest.driver)) != rest.said:
            return False
        return all(cache.changed_at(owner) <= rest.seen_at for owner in rest.owners)

    def _rest(
        self, key: JobKey, seen_at: int, job: RLJob, observed: Observed, holds_until: datetime, now: datetime
    ) -> _Rest:
        models = {reward.reward_model_ref.name for reward in job.spec.rewards if reward.reward_model_ref}
        owners = [OwnerKey(RLJOB.kind, *key), *(OwnerKey(REWARD_MODEL.kind, key.namespace, name) for name in models)]
        latest = now + timedelta(seconds=MAX_REST_SECONDS - hash(key) % _SPREAD_SECONDS)
        driver = self._backend.find_driver(job, observed)
        said = _without_demand(observed.driver)
        return _Rest(seen_at, tuple(owners), driver, said, min(latest, holds_until))


def _without_demand(said: DriverStatus | None) -> DriverStatus | None:
    """Demand has times that pass, and no job at rest is scaled by it."""
    return said.model_copy(update={"demand": {}}) if said else None
