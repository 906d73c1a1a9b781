"""The whole operator in one coroutine: check of the CRDs, the lead, the feed, the workers. Owns their order.

Invariant: nothing is written unless the Lease is held; when it is lost, `run_operator` raises LeaseLost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from rljob_api.errors import RLJobError, TransientError
from rljob_operator.backend import Event, JobKey, utc_now
from rljob_operator.defaults import Defaults
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache
from rljob_operator.kube.client import ApiError, KubeApi, NamespaceGoneError, connect
from rljob_operator.kube.crds import crd_path, describe_problem
from rljob_operator.kube.driver import DriverClient
from rljob_operator.kube.idle import Resting
from rljob_operator.kube.informer import Feed
from rljob_operator.kube.invalid import InvalidRewardModelError, build_invalid_model_status
from rljob_operator.kube.lease import Lease
from rljob_operator.kube.resources import REWARD_MODEL, RLJOB
from rljob_operator.kube.tasks import finish, to_the_end
from rljob_operator.loop.health import Health
from rljob_operator.loop.metrics import Metrics
from rljob_operator.loop.reconcile import REASON_FORBIDDEN, ForbiddenError
from rljob_operator.loop.workqueue import Key, KeyedQueue, RewardModelKey, describe, run
from rljob_operator.plan.reward_model import reconcile_reward_model
from rljob_operator.settings import Settings

log = logging.getLogger(__name__)
_CRD_RETRY_SECONDS = 5.0
_SECONDS_BETWEEN_LOOKS = 1.0
"""At one job upon changes: while its Pods start there are dozens."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class LeaseLost(RLJobError):  # noqa: N818 - it says what happened
    """Another replica may lead by now: the process must end."""


async def run_operator(
    settings: Settings,
    *,
    api: KubeApi | None = None,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], datetime] = utc_now,
    on_watching: Callable[[], None] = lambda: None,
) -> None:
    """Run until cancelled. `api` is closed by who made it; api.hooks sees every request. `on_watching` is called when
    kopf has started its watches, and with them its own handlers of signals."""
    own = api is None
    api = api or await connect(settings.kubeconfig)
    queue, metrics = KeyedQueue(_SECONDS_BETWEEN_LOOKS), Metrics()
    health = Health(queue, metrics, clock)
    api.on_response = metrics.on_response
    runners = await health.serve(settings.health_port, settings.metrics_port)
    lease = Lease(
        api,
        _lease_namespace(settings),
        settings.lease_name,
        f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}",
        settings.lease_seconds,
    )

    async def end() -> None:
        with contextlib.suppress(RLJobError):
            await lease.release()
        for runner in runners:
            await runner.cleanup()
        if own:
            await api.close()

    try:
        await _wait_for_crds(api, health)
        if settings.lease:
            health.is_ready = lambda: True  # a standby is ready to lead
            await lease.acquire()
        metrics.leader.set(1)
        await _lead(settings, api, lease if settings.lease else None, health, clock, now, on_watching)
    finally:
        await to_the_end(end())


async def _lead(
    settings: Settings,
    api: KubeApi,
    lease: Lease | None,
    health: Health,
    clock: Callable[[], float],
    now: Callable[[], datetime],
    on_watching: Callable[[], None],
) -> None:
    cache, driver = Cache(clock), DriverClient(clock)
    feed = Feed(api, cache, settings.namespaces, settings.resync_seconds)
    feed.on_watching = on_watching
    health.is_ready, health.unheard_seconds = (lambda: feed.has_listed), cache.unheard_seconds
    backend = KubernetesBackend(
        api, cache, driver, keys=feed.keys, may_write=lambda: lease is None or lease.is_held, now=now
    )
    backend.on_read = health.metrics.record_owner
    resting, defaults = Resting(backend), Defaults(settings.trainer_image, settings.reward_image)

    async def reconcile_key(_: KubernetesBackend, key: Key, at: datetime) -> float | None:
        is_model = isinstance(key, RewardModelKey)
        health.working[key] = clock()
        try:
            with health.metrics.reconcile.labels("RewardModel" if is_model else "RLJob").time():
                return await look(backend, resting, key, at, defaults)
        except Exception as error:
            health.metrics.errors.labels(type(error).__name__).inc()
            raise
        finally:
            health.working.pop(key, None)

    work = asyncio.create_task(
        run(backend, settings.workers, clock=clock, now=now, queue=health.queue, reconcile_key=reconcile_key)
    )
    tasks: list[asyncio.Task[None]] = [work]
    if lease is not None:
        tasks.append(asyncio.create_task(lease.hold()))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if work not in done:
            raise LeaseLost("the Lease could not be renewed; another replica takes over")
    finally:
        for task in tasks:
            task.cancel()
        try:
            await finish(tasks)
        finally:
            await driver.close()


async def look(
    backend: KubernetesBackend, resting: Resting, key: Key, now: datetime, defaults: Defaults
) -> float | None:
    """One look at a job or a RewardModel. One that went with its namespace is forgotten: no try could succeed."""
    about, is_model = JobKey(key.namespace, key.name), isinstance(key, RewardModelKey)
    try:
        if is_model:
            return await _reconcile_model(backend, about, now, defaults)
        return await resting.reconcile(about, now, defaults)
    except NamespaceGoneError:
        if not await backend.is_gone(REWARD_MODEL if is_model else RLJOB, about):
            raise
        log.info("%s went with its namespace", describe(key))
        return None


async def _reconcile_model(backend: KubernetesBackend, key: JobKey, now: datetime, defaults: Defaults) -> float | None:
    try:
        return await reconcile_reward_model(backend, key, now, defaults)
    except InvalidRewardModelError as error:
        status, events = build_invalid_model_status(error, now)
        if status != error.model.status:
            await backend.update_reward_model_status(error.model, status)
        for event in events:
            await backend.record_event(error.model, event)
        return None
    except ForbiddenError as error:
        with contextlib.suppress(TransientError):  # Events may be forbidden as well
            if model := await backend.get_reward_model(key):
                await backend.record_event(model, Event("Warning", REASON_FORBIDDEN, str(error)))
        raise


async def _wait_for_crds(api: KubeApi, health: Health) -> None:
    while problem := await _crd_problem(api):
        health.why_not_ready = problem
        log.error("%s; next look in %.0f s", problem, _CRD_RETRY_SECONDS)
        await asyncio.sleep(_CRD_RETRY_SECONDS)
    health.why_not_ready = "lists every kind for the first time"


async def _crd_problem(api: KubeApi) -> str:
    """What keeps this operator from starting; empty when nothing does."""
    for resource in (RLJOB, REWARD_MODEL):
        try:
            crd = await api.request("GET", crd_path(resource))
        except ApiError as error:
            if error.code == 403:
                log.warning("may not read CustomResourceDefinitions: their version is not checked")
                return ""
            return f"CRD {resource.plural}.{resource.group}: {error.message}; apply the files in crds/"
        except TransientError as error:
            return str(error)
        if problem := describe_problem(resource, crd):
            return problem
    return ""


def _lease_namespace(settings: Settings) -> str:
    if settings.lease_namespace:
        return settings.lease_namespace
    return (
        _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else os.environ.get("POD_NAMESPACE", "default")
    )
