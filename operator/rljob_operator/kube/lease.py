"""Leader election among the operator's replicas, by a coordination.k8s.io Lease.

Invariant: a leader that could not renew for two thirds of the Lease's duration stops leading; another replica may take
over at the end of the duration. A replica measures expiry with its own clock, from the last change of the Lease that it
saw, never with the Lease's timestamps.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from rljob_api.errors import TransientError
from rljob_core.backend import utc_now
from rljob_core.kube.client import ApiError, KubeApi

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
