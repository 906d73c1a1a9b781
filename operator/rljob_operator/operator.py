"""The whole operator in one coroutine: checks the CRDs, acquires the Lease, runs the informer and the workers.

Owns their order. Invariant: nothing is written unless the Lease is held; when it is lost, `run_operator` raises
LeaseLostError.

Replicas elect their leader by a coordination.k8s.io Lease. Invariant: a leader that could not renew for two thirds of
the Lease's duration stops leading; another replica may take over at the end of the duration. A replica measures expiry
with its own clock, from the last change of the Lease that it saw, never with the Lease's timestamps.
"""

import asyncio
import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rljob_api.errors import RLJobError, TransientError
from rljob_core.backend import Key, RewardModelKey, utc_now
from rljob_core.defaults import Defaults
from rljob_core.kube.client import ApiError, KubeApi, connect
from rljob_core.kube.resources import WATCHED
from rljob_core.loop.failures import FailureTracker
from rljob_core.loop.reconcile import StatusPace, reconcile
from rljob_core.loop.workqueue import ReconcileKey, WorkQueue, run
from rljob_core.plan.built_children import BuiltChildren
from rljob_operator.health import Health
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache
from rljob_operator.kube.crds import check_crds
from rljob_operator.kube.driver import DriverClient
from rljob_operator.kube.idle import IdleTracker
from rljob_operator.metrics import OperatorMetrics
from rljob_operator.settings import Settings
from rljob_operator.watch.informer import Informer
from rljob_operator.watch.tasks import run_uncancelled, wait_for_all

log = logging.getLogger(__name__)

# Fractions of the Lease's duration, as in client-go.
_RENEW_DEADLINE = 2 / 3
_RETRY = 2 / 15


class Lease:
    """`await acquire()`, then run `hold()` during the work: it returns when the Lease is lost."""

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        name: str,
        identity: str,
        seconds: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._deadline_seconds, self._retry_seconds = seconds * _RENEW_DEADLINE, seconds * _RETRY
        self._api, self._identity, self._clock = api, identity, clock
        self._base = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._seen: tuple[str, float] = ("", 0.0)
        """The last resourceVersion, and when it was first seen."""
        self._renewed_at: float | None = None

    @property
    def is_held(self) -> bool:
        return self._renewed_at is not None and self._clock() - self._renewed_at < self._deadline_seconds

    async def acquire(self) -> None:
        while not await self._try_renew():  # noqa: ASYNC110 - the state is on another machine
            await asyncio.sleep(self._retry_seconds)
        log.info("leading as %s", self._identity)

    async def hold(self) -> None:
        while self.is_held:
            await asyncio.sleep(self._retry_seconds)
            await self._try_renew()

    async def release(self) -> None:
        """Let another replica take over immediately. If shutdown took longer than the renew deadline, the Lease is
        still released unless another replica has taken it."""
        if self._renewed_at is not None:
            await self._try_renew(release=True)
        self._renewed_at = None

    async def _try_renew(self, *, release: bool = False) -> bool:
        started_at = self._clock()
        try:
            async with asyncio.timeout(self._deadline_seconds / 2):
                held = await self._renew(release)
        except (ApiError, TransientError, TimeoutError) as error:
            log.warning("lease %s: %s", self._name, error or type(error).__name__)
            return False
        self._renewed_at = started_at if held else None
        return held

    async def _renew(self, release: bool) -> bool:
        try:
            lease = await self._api.request("GET", f"{self._base}/{self._name}")
        except ApiError as error:
            if error.code != 404:
                raise
            if release:
                return False
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
            await self._api.request("POST", self._base, body=body | {"spec": self._spec({}, release)})
            return True
        spec, version = lease.get("spec") or {}, lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, self._clock())
        holder = spec.get("holderIdentity")
        duration = float(spec.get("leaseDurationSeconds") or self._seconds)
        if holder != self._identity and (release or (holder and self._clock() - self._seen[1] < duration)):
            return False
        # The resourceVersion in the body: if two replicas take over at once, one gets 409.
        await self._api.request("PUT", f"{self._base}/{self._name}", body=lease | {"spec": self._spec(spec, release)})
        return not release

    def _spec(self, old: dict[str, Any], release: bool) -> dict[str, Any]:
        now = utc_now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        was_held = old.get("holderIdentity") == self._identity
        return {
            "holderIdentity": "" if release else self._identity,
            "leaseDurationSeconds": 1 if release else self._seconds,
            "acquireTime": old.get("acquireTime") if was_held else now,
            "renewTime": now,
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (0 if was_held else 1),
        }


_CRD_RETRY_SECONDS = 5.0
_MIN_RECONCILE_INTERVAL_SECONDS = 1.0
"""Between two reconciles of one object: starting Pods cause dozens of changes."""
_READ_CONNECTIONS = 2
"""For LISTs, which follow each other. They wait for no write: until a LIST has ended, no namespace's jobs are seen."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_COUNTED = {resource.plural for resource in WATCHED} | {"leases", "customresourcedefinitions"}


class LeaseLostError(RLJobError):
    """Another replica may be leading: the process must end."""


async def run_operator(
    settings: Settings,
    *,
    api: KubeApi | None = None,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], datetime] = utc_now,
    on_watching: Callable[[], None] = lambda: None,
) -> None:
    """Run until cancelled. A given `api` is not closed. `on_watching`: see Informer."""
    owns_api = api is None
    api = api or await connect(settings.kubeconfig)
    metrics = OperatorMetrics(_COUNTED)
    api.observers.append(metrics.on_response)
    cache = Cache(clock)
    reader = api.separate(max_connections=_READ_CONNECTIONS)
    informer = Informer(reader, cache, settings.namespaces, settings.resync_seconds, on_watching)
    health = Health(
        WorkQueue(_MIN_RECONCILE_INTERVAL_SECONDS),
        metrics,
        clock,
        has_listed=lambda: informer.has_listed,
        unconfirmed_write_seconds=cache.unconfirmed_write_seconds,
    )
    server = await health.serve(settings.health_port, settings.metrics_port)
    identity = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    namespace = settings.lease_namespace or _pod_namespace() or "default"
    lease_api = api.separate(max_connections=1) if settings.lease else None  # never waits for requests of reconciles
    lease = Lease(lease_api, namespace, settings.lease_name, identity, settings.lease_seconds) if lease_api else None

    async def end() -> None:
        if lease and lease_api:
            with contextlib.suppress(RLJobError):
                await lease.release()
            await lease_api.close()
        await reader.close()
        await server.cleanup()
        if owns_api:
            await api.close()

    try:
        await _wait_for_crds(api, health)
        if lease:
            health.stand_by()
            await lease.acquire()
        metrics.leader.set(1)
        health.lead()
        await _lead(settings, api, cache, informer, lease, health, clock, now)
    finally:
        await run_uncancelled(end())


async def _wait_for_crds(api: KubeApi, health: Health) -> None:
    while problem := await check_crds(api):
        health.wait_for(problem)
        log.error("%s; next check in %.0f s", problem, _CRD_RETRY_SECONDS)
        await asyncio.sleep(_CRD_RETRY_SECONDS)


async def _lead(
    settings: Settings,
    api: KubeApi,
    cache: Cache,
    informer: Informer,
    lease: Lease | None,
    health: Health,
    clock: Callable[[], float],
    now: Callable[[], datetime],
) -> None:
    driver = DriverClient(clock, informer.requeue)
    backend = KubernetesBackend(
        api,
        cache,
        driver,
        may_write=lambda: lease is None or lease.is_held,
        now=now,
        clock=clock,
        on_read=health.metrics.record_owner,
    )
    reconcile_key = build_reconcile(backend, health, complete_defaults(settings.defaults, _pod_namespace()), clock)
    work = asyncio.create_task(
        run(
            informer.keys,
            reconcile_key,
            settings.workers,
            clock=clock,
            now=lambda: now() - api.ahead,
            queue=health.queue,
        )
    )
    tasks: list[asyncio.Task[None]] = [work, asyncio.create_task(health.measure_stalls())]
    if lease is not None:
        tasks.append(asyncio.create_task(lease.hold()))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if work not in done:
            raise LeaseLostError("the Lease could not be renewed; another replica takes over")
    finally:
        for task in tasks:
            task.cancel()
        try:
            await wait_for_all(tasks)
        finally:
            await driver.close()


def build_reconcile(
    backend: KubernetesBackend, health: Health, defaults: Defaults, clock: Callable[[], float]
) -> ReconcileKey:
    """Return what a worker does with a key: skip an idle job, else reconcile and measure."""
    idle, metrics, failures = IdleTracker(backend), health.metrics, FailureTracker(clock)
    health.refused_statuses = failures.refused_statuses
    reconcile_owner = partial(
        reconcile,
        backend,
        failures=failures,
        build=BuiltChildren().build,
        pace=StatusPace(),
    )

    async def reconcile_key(key: Key, now: datetime) -> float | None:
        kind = "RewardModel" if isinstance(key, RewardModelKey) else "RLJob"
        try:
            with health.track_reconcile(key), metrics.reconcile.labels(kind).time():
                if (seconds := await idle.idle_seconds(key, now)) is not None:
                    return seconds
                on_unchanged = idle.track(key, now)
                return await reconcile_owner(key, now, defaults, on_unchanged=on_unchanged)
        except Exception as error:
            metrics.errors.labels(type(error).__name__).inc()
            raise

    return reconcile_key


def complete_defaults(defaults: Defaults, own_namespace: str | None) -> Defaults:
    """Return the defaults with the operator's own namespace, unless they name another one. None: outside a cluster."""
    return defaults.model_copy(update={"operator_namespace": defaults.operator_namespace or own_namespace})


def _pod_namespace() -> str | None:
    return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else None
