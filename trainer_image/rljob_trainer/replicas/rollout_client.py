"""The rollout client: token ids to completions, over the vLLM replicas that serve the required weights.

`generate` has the format of requests and responses. Invariant: every token comes from weights that are exactly what the
trainer published, and none from weights older than those required when its request was sent. A lost replica loses no
request.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import aiohttp
import msgspec
from numpy.typing import NDArray

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.roles import RolloutRole, Sampling
from rljob_api.tracing.spans import Span
from rljob_api.wire import contract
from rljob_api.wire.discovery import listening_port, resolve
from rljob_api.wire.driver_status import HungPart
from rljob_api.wire.weights import MAX_PULL_ERROR_LENGTH, PullReport, RolloutWeights, WeightManifest
from rljob_trainer import traces
from rljob_trainer.concurrency import end_tasks
from rljob_trainer.episodes.types import Completion, PromptTooLongError
from rljob_trainer.outages import Outages
from rljob_trainer.replicas import generate
from rljob_trainer.replicas.fleet import Affinity
from rljob_trainer.replicas.http import CONNECT_SECONDS, auth_headers, send
from rljob_trainer.replicas.pool import ReplicaLease, ReplicaPool
from rljob_trainer.replicas.pull_reports import PullReports

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 30
"""Attempts per request while others succeed. Bounds a request that kills every replica it reaches."""
_REFUSALS = (400, 404, 422, 501)
"""Statuses of a request that every replica of this vLLM refuses."""
_POLL_SECONDS = 20.0
"""Duration of one long poll of /rljob/weights."""
_STRAGGLER_SECONDS = 5.0
"""How long a step waits for the other healthy replicas once one is ready, which would otherwise get all requests."""


class RolloutClient:
    def __init__(
        self,
        role: RolloutRole,
        session: aiohttp.ClientSession,
        *,
        per_pod: int = 1,
        spans_updates: bool = False,
        reports: PullReports | None = None,
        special_ids: Mapping[str, int] | None = None,
        stall_seconds: float = 600.0,
        outages: Outages | None = None,
        on_mismatch: Callable[[], None] = lambda: None,
    ) -> None:
        """`per_pod`: replicas behind each address of the Service. `spans_updates`: a completion may continue with newer
        weights than it began with; else it is retried. `reports`: what the replicas report to the head, if they do.
        `special_ids`: see generate.build_payload. `stall_seconds`: for which no replica may get nearer to new weights.
        `on_mismatch`: called for each replica that serves other weights than the trainer published."""
        service = os.environ[contract.ENV_ROLLOUT_SERVICE]
        self.replicas = ReplicaPool(
            f"rollouts ({service})",
            lambda: list_addresses(service, per_pod),
            max_in_flight=role.max_in_flight,
            health=(outages or Outages()).watch(f"spec.rollout ({service})", "see `kubectl rljob explain`"),
            on_tick=self._verify_all,
        )
        self.served: dict[str, RolloutWeights] = {}
        """Last report of each replica that serves the required weights, by address."""
        self._on_mismatch = on_mismatch
        self._role, self._special_ids = role, special_ids
        self._spans_updates = spans_updates
        self._reports = reports or PullReports()
        self._stall_seconds = stall_seconds
        self._session = session
        self._manifest: WeightManifest | None = None
        self._verifying: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        await self.replicas.start()

    async def close(self) -> None:
        await self.replicas.close()
        await self._stop_verifying()

    async def complete(
        self,
        token_ids: list[int],
        sampling: Sampling,
        seed: int,
        affinity: Affinity | None = None,
        extra: Mapping[str, Any] = MappingProxyType({}),
        adapter: Mapping[str, str] = MappingProxyType({}),
    ) -> Completion:
        """`affinity`: that of the episode. `extra`: further sampling parameters of vLLM. `adapter`: fields of the
        request that choose one of several. Raise PromptTooLongError if the prompt leaves no room for a token, and
        UserError for what vLLM refuses for another reason."""
        avoid, num_attempts = set[str](), 0
        failing_since: float | None = None
        while num_attempts < _MAX_ATTEMPTS:
            async with self.replicas.lease(avoid, affinity=affinity) as lease:
                key = self.replicas.fleet.required_key
                payload = {**generate.build_payload(token_ids, sampling, seed, key, self._special_ids), **adapter}
                payload["sampling_params"] |= extra
                with traces.begin_attempt(f"http://{lease.address}", generate.PATH, num_attempts + 1) as span:
                    completion = await self._attempt(lease, payload, key, span)
                    span.set({"rljob.retried": completion is None})
                if completion is not None:
                    return completion
                avoid.add(lease.address)
            before, failing_since = failing_since, self.replicas.fleet.health.failing_since
            num_attempts += failing_since is None or failing_since != before  # else the rollouts are away
        raise TransientError(
            f"a completion failed {_MAX_ATTEMPTS} times, on {len(avoid)} replicas; see the driver's log"
        )

    async def score(
        self, token_ids: list[int], top_k: int = 0, adapter: Mapping[str, str] = MappingProxyType({})
    ) -> NDArray[Any] | None:  # [tokens - 1]
        """Return what generate.read_scores does; None if vLLM refuses to compute it. `adapter`: as of `complete`."""
        payload = {**generate.build_score_payload(token_ids, self.replicas.fleet.required_key, top_k), **adapter}
        return await self._post(generate.PATH, payload, lambda body: generate.read_scores(body, token_ids, top_k))

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the ids that a rollout gives a text; None if it has no tokenizer."""
        payload = {"model": contract.SERVED_MODEL_NAME, "prompt": text, "add_special_tokens": False}
        return await self._post("/tokenize", payload, lambda body: list(body["tokens"]))

    async def _post(self, path: str, payload: dict[str, Any], read: Callable[[Any], Any]) -> Any:
        """Return what `read` makes of a rollout's response; None if it refuses the request. A response that cannot be
        read, as of a request that vLLM aborted, is repeated. TransientError as `complete`."""
        avoid = set[str]()
        for _ in range(_MAX_ATTEMPTS):
            async with self.replicas.lease(avoid) as lease:
                try:
                    url, seconds = f"http://{lease.address}{path}", self._role.stall_timeout_seconds
                    async with send(self._session, "POST", url, seconds, json=payload) as response:
                        if response.status in _REFUSALS:
                            log.info("%s refuses %s: %s", lease.address, path, (await response.text())[:500])
                            lease.answered()
                            return None
                        response.raise_for_status()
                        found = read(await response.json())
                except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                    lease.failed(f"{path}: {type(error).__name__}: {error}")
                    avoid.add(lease.address)
                else:
                    lease.done()
                    return found
        raise TransientError(f"a request for {path} failed {_MAX_ATTEMPTS} times; see the driver's log")

    async def _attempt(self, lease: ReplicaLease, payload: dict[str, Any], key: str, span: Span) -> Completion | None:
        """Return None if another replica should serve the request."""
        try:
            try:
                completion = await self._stream(lease, payload, span)
            except generate.RejectedPromptError:
                await self._check_length(lease.address, len(payload["token_ids"]))
                raise
        except (UserError, PromptTooLongError):
            raise
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            span.fail(type(error).__name__)
            if isinstance(error, aiohttp.SocketTimeoutError):
                lease.silent(self._role.stall_timeout_seconds)
            else:
                lease.failed(f"{type(error).__name__}: {error}")
            return None
        match judge_versions(completion, key, spans_updates=self._spans_updates):
            case "accept":
                lease.done()
                return completion
            case "updated":
                log.info("%s: a completion of weights %s met an update; it is retried", lease.address, key)
                lease.updated()
            case "foreign":
                versions = sorted({completion.versions[0], completion.versions[-1]})
                found = " to ".join(f"{completion.generation}:{version}" for version in versions)
                lease.failed(f"generated with weights {found} instead of {key}")
        return None

    async def _stream(self, lease: ReplicaLease, payload: dict[str, Any], span: Span) -> Completion:
        """The timeout is of silence, not of the completion: a long one is well as long as tokens arrive."""
        url = f"http://{lease.address}{generate.PATH}"
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=self._role.stall_timeout_seconds
        )
        reader = generate.ResponseReader()
        body, headers = msgspec.json.encode(payload), {"Content-Type": "application/json"} | auth_headers()
        async with self._session.post(
            url, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            span.record_status(response.status)
            if response.status != 200:
                text = await response.text()
                generate.raise_rejection(response.status, text)
                raise generate.UnusableResponseError(f"{response.status} {text[:200]}")
            async for line in response.content:
                reader.add_line(line)
                lease.progressed()
        return reader.finish()

    async def _check_length(self, address: str, num_tokens: int) -> None:
        """Raise PromptTooLongError if the replica takes no prompt of `num_tokens`. Its engine alone knows: arguments
        and variables of vLLM can change the limit, and replicas can differ while they are replaced."""
        url = f"http://{address}/v1/models"
        async with send(self._session, "GET", url, self._role.stall_timeout_seconds) as response:
            response.raise_for_status()
            limit = generate.read_context_length(await response.json())
        if limit is not None and num_tokens >= limit:
            raise PromptTooLongError(num_tokens, limit)

    def require(self, manifest: WeightManifest) -> None:
        """From now on, send requests only to replicas that serve `manifest`. Those in flight continue."""
        self._manifest = manifest
        self.replicas.fleet.required_key = manifest.key

    async def sync(self, manifest: WeightManifest) -> dict[str, RolloutWeights]:
        """Require `manifest`. Wait until one replica serves it, and up to _STRAGGLER_SECONDS for the others.
        TransientError if replicas try, and for `stall_seconds` none gets nearer; OutageError if none exists or answers
        for spec.outageSeconds."""
        self.replicas.is_awaited = True
        try:
            return await self._sync(manifest)
        finally:
            self.replicas.is_awaited = False

    async def _sync(self, manifest: WeightManifest) -> dict[str, RolloutWeights]:
        self.require(manifest)
        fleet = self.replicas.fleet
        await self._stop_verifying()
        self.served = {}
        self._verify_all()
        now, since = self.replicas.now, self.replicas.now()
        first_at: float | None = None
        while True:
            if fleet.num_serving():
                first_at = first_at or now()
                if not fleet.stragglers() or now() - first_at > _STRAGGLER_SECONDS:
                    return dict(self.served)
            elif fleet.replicas and all(r.rejected_key == manifest.key for r in fleet.replicas.values()):
                raise TransientError(
                    f"every rollout serves weights {manifest.key} with a digest that differs from the trainer's; "
                    "see the driver's log"
                )
            elif reasons := self._reports.describe_stalled(manifest.key, since, self._stall_seconds, now()):
                raise TransientError(
                    f"no rollout has got nearer to weights {manifest.key} for {self._stall_seconds:.0f} s: {reasons}"
                )
            fleet.health.check()
            await asyncio.sleep(0.02)

    def list_hung(self) -> list[HungPart]:
        """Return the replicas whose engine hung, until they serve again or have left."""
        return self._reports.list_hung(self.replicas.fleet.replicas, self.replicas.now())

    def describe_wait(self) -> str:
        fleet = self.replicas.fleet
        if not fleet.required_key or fleet.num_serving():
            return ""
        errors = self._reports.describe_errors(fleet.required_key, self.replicas.now())
        return f"waits for a rollout to serve weights {fleet.required_key} (0 of {len(fleet.replicas)} do)" + (
            f": {errors}" if errors else ""
        )

    def _verify_all(self) -> None:
        manifest = self._manifest
        if manifest is None:
            return
        for address in self.replicas.fleet.list_unverified(self.replicas.now()):
            running = self._verifying.get(address)
            if running is None or running.done():
                self._verifying[address] = asyncio.create_task(self._verify(address, manifest))

    async def _verify(self, address: str, manifest: WeightManifest) -> None:
        """Ask one replica what it serves. It delays its answer until it serves the required weights."""
        fleet = self.replicas.fleet
        url = f"http://{address}{contract.UrlPath.ROLLOUT_WEIGHTS}"
        query = {"want": manifest.key, "timeout": str(_POLL_SECONDS)}

        try:
            async with send(self._session, "GET", url, _POLL_SECONDS + 10, params=query) as response:
                response.raise_for_status()
                served = RolloutWeights.model_validate(await response.json())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            reason = f"does not report its weights: {type(error).__name__}: {error}"
            log.info("rollout %s %s", address, reason)
            fleet.record_suspect(address, self.replicas.now(), f"{address} {reason}")
            self._record_report(address, manifest, reason)
            return
        if served.key != manifest.key:
            # Stale; the next tick asks again.
            serves = f"serves {served.key}" if served.generation else "has loaded no weights yet"
            self._record_report(address, manifest, served.error or serves)
            return
        if (served.checksum, served.file_hash) != (manifest.checksum, manifest.file_hash):
            fleet.record_rejected(address, manifest.key)
            log.error(
                "rollout %s serves weights %s with digest %s, but the trainer published %s; the replica is not used",
                *(address, manifest.key, served.checksum, manifest.checksum),
            )
            self._on_mismatch()
            return
        self.served[address] = served
        self._reports.record_serves(address)
        fleet.record_serves(address, manifest.key)
        self.replicas.dispatch()

    def _record_report(self, address: str, manifest: WeightManifest, reason: str) -> None:
        report = PullReport(replica=address, key=manifest.key, error=reason[:MAX_PULL_ERROR_LENGTH])
        self._reports.record(report, self.replicas.now())

    async def _stop_verifying(self) -> None:
        tasks, self._verifying = self._verifying.values(), {}
        await end_tasks(*tasks)


def list_addresses(service: str, per_pod: int) -> list[str]:
    """Return IP:PORT of each replica: several in a Pod listen at consecutive ports. Replicas report under this name."""
    ports = [listening_port(contract.PORT_ROLLOUT + number) for number in range(per_pod)]
    return [f"{address}:{port}" for address in resolve(service) for port in ports]


def judge_versions(completion: Completion, key: str, *, spans_updates: bool) -> Literal["accept", "updated", "foreign"]:
    """Judge a completion that was requested with the weights `key`. updated: the replica is right, and too new for a
    completion that must not span updates. foreign: the replica restarted, or serves other weights than announced."""
    generation, _, version = key.rpartition(":")
    if completion.generation != generation or min(completion.versions) < int(version):
        return "foreign"
    return "accept" if spans_updates or max(completion.versions) == int(version) else "updated"
