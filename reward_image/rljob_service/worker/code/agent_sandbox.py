"""Provider agentSandbox of the tools that run code: a sandbox of kubernetes-sigs/agent-sandbox for each episode.

Reads what the operator mounts: warm pool, port and token. Leaves processes to sandbox_server, which runs in the
sandbox. Invariant: calls of one episode meet in one sandbox, whichever replica or worker executes them; a call ends
before the worker is killed for its time.

Claims of sandboxes are found or made, waited for, and deleted in the Kubernetes API. Speaks HTTPS with the Pod's
service-account token, which may create, read and delete SandboxClaims and read the warm pool, and nothing else.
Invariant: all replicas and workers of a tool find the same claim for an episode. A claim belongs to its pool and
expires, so it never remains.
"""

import contextlib
import http.client
import json
import math
import ssl
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rljob_api.wire.contract import FILE_SANDBOX, PATH_SANDBOX

_GROUP = "extensions.agents.x-k8s.io/v1beta1"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SERVER = "kubernetes.default.svc"
_FIRST_WAIT_SECONDS, _MAX_WAIT_SECONDS, _GROWTH = 0.05, 1.0, 1.5
_MIN_REQUEST_SECONDS, _MAX_REQUEST_SECONDS = 1.0, 30.0
_MAX_SHOWN_CHARACTERS = 300

_Object = dict[str, Any]
"""One of the API server."""


class ClaimError(Exception):
    """No sandbox could be claimed."""


class KubernetesApi(Protocol):
    def request(self, method: str, path: str, body: _Object | None = None) -> tuple[int, _Object]:
        """Return the status and the object. Raise OSError and http.client.HTTPException."""


class InClusterApi(NamedTuple):
    """The API server of the cluster in which this Pod runs."""

    deadline: float = math.inf
    """When all requests end, by time.monotonic()."""
    account: Path = _ACCOUNT
    server: str = _SERVER

    @property
    def namespace(self) -> str:
        """Namespace of this Pod."""
        return (self.account / "namespace").read_text().strip()

    def request(self, method: str, path: str, body: _Object | None = None) -> tuple[int, _Object]:
        """Make one request, with the current token: the kubelet replaces it every hour."""
        context = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        # After the deadline, too: the claim of a call that took all its time is still deleted.
        seconds = max(_MIN_REQUEST_SECONDS, min(_MAX_REQUEST_SECONDS, self.deadline - time.monotonic()))
        connection = http.client.HTTPSConnection(self.server, timeout=seconds, context=context)
        headers = {"Authorization": f"Bearer {(self.account / 'token').read_text().strip()}"}
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {**headers, "Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"{}")
        finally:
            connection.close()


class Claims(NamedTuple):
    """The claims of the episodes of one tool."""

    api: KubernetesApi
    namespace: str
    pool: str
    lifetime_seconds: float
    """After which the cluster deletes a claim that still exists."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def get_address(self, episode: str, seconds: float) -> str:
        """Return the address of the episode's sandbox. Claim one if it has none. Raise ClaimError if none is ready
        within `seconds`."""
        path = self._path("sandboxclaims", build_name(self.pool, episode))
        deadline, wait, problem = self.clock() + seconds, _FIRST_WAIT_SECONDS, "the claim has no status yet"
        while True:
            claim = self._request("GET", path) or self._create(episode)
            is_leaving = claim["metadata"].get("deletionTimestamp")
            if not is_leaving and (address := _read_address(claim)):
                return address
            problem = "its last claim is being deleted" if is_leaving else _describe(claim) or problem
            left = deadline - self.clock()
            if left <= 0:
                raise ClaimError(f"no sandbox of the pool {self.pool} was ready within {seconds:.0f} s: {problem}")
            self.sleep(min(wait, left))
            wait = min(wait * _GROWTH, _MAX_WAIT_SECONDS)

    def delete(self, episode: str) -> None:
        """Delete the episode's claim, and with it its sandbox. Raise ClaimError."""
        self._request("DELETE", self._path("sandboxclaims", build_name(self.pool, episode)))

    def _create(self, episode: str) -> _Object:
        pool = self._request("GET", self._path("sandboxwarmpools", self.pool))
        if pool is None:
            raise ClaimError(f"the SandboxWarmPool {self.pool} does not exist: the job ends or is suspended")
        expiry = self.now() + timedelta(seconds=self.lifetime_seconds)
        claim = build_claim(pool["metadata"], build_name(self.pool, episode), expiry)
        made = self._request("POST", self._path("sandboxclaims"), claim)
        return claim if made is None else made

    def _path(self, plural: str, name: str = "") -> str:
        path = f"/apis/{_GROUP}/namespaces/{self.namespace}/{plural}"
        return f"{path}/{name}" if name else path

    def _request(self, method: str, path: str, body: _Object | None = None) -> _Object | None:
        """Return the object; None if it does not exist, or if one to create exists."""
        try:
            status, answer = self.api.request(method, path, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ClaimError(f"the Kubernetes API does not answer: {type(error).__name__}: {error}") from error
        if status == 404 or (status == 409 and method == "POST"):
            return None
        if status >= 300:
            message = str(answer.get("message", ""))[:_MAX_SHOWN_CHARACTERS]
            raise ClaimError(f"the Kubernetes API answers {method} {path} with {status}: {message}")
        return answer


def build_name(pool: str, episode: str) -> str:
    """Return the name of an episode's claim, and if no warm one is left of its sandbox and its Pod."""
    return f"rljob-{sha256(f'{pool}/{episode}'.encode()).hexdigest()[:32]}"


def build_claim(pool: _Object, name: str, expiry: datetime) -> _Object:
    """Return the SandboxClaim. `pool`: metadata of the warm pool, to which it belongs."""
    owner = {"apiVersion": _GROUP, "kind": "SandboxWarmPool", "name": pool["name"], "uid": pool["uid"]}
    return {
        "apiVersion": _GROUP,
        "kind": "SandboxClaim",
        "metadata": {"name": name, "labels": pool.get("labels") or {}, "ownerReferences": [owner]},
        "spec": {
            "warmPoolRef": {"name": pool["name"]},
            "lifecycle": {"shutdownTime": f"{expiry:%Y-%m-%dT%H:%M:%SZ}", "shutdownPolicy": "Delete"},
        },
    }


def _read_address(claim: _Object) -> str:
    """Return the address of the sandbox's Pod; empty until it is ready."""
    status = claim.get("status") or {}
    addresses = (status.get("sandbox") or {}).get("podIPs") or []
    return str(addresses[0]) if addresses and _find_ready(status).get("status") == "True" else ""


def _describe(claim: _Object) -> str:
    ready = _find_ready(claim.get("status") or {})
    text = f"{ready.get('reason', '')}: {ready.get('message', '')}" if ready else ""
    return text[:_MAX_SHOWN_CHARACTERS]


def _find_ready(status: _Object) -> _Object:
    return next((each for each in status.get("conditions") or [] if each.get("type") == "Ready"), {})


_MARGIN_SECONDS = 2.0
"""For the answer, after the end of the code. The worker is killed some seconds later."""
_MIN_SECONDS = 1.0
"""For the code, after the wait for a sandbox."""


class SandboxSettings(NamedTuple):
    """FILE_SANDBOX: written by the operator, and read again for each call."""

    pool: str
    port: int
    token: str
    seconds: float


class AgentSandbox(NamedTuple):
    """Runs code in the sandbox of the call's episode."""

    timeout_seconds: float
    max_characters: int
    """What the model sees of a call."""
    problem: str = ""

    def run(self, language: str, code: str, episode: str) -> str:
        """Return what the model sees. Raise ClaimError, OSError and http.client.HTTPException."""
        deadline = time.monotonic() + self.timeout_seconds
        settings = read_settings()
        claims = open_claims(settings, deadline)
        own = episode or uuid.uuid4().hex  # a call outside of an episode shares its sandbox with no other
        try:
            address = claims.get_address(own, max(_MIN_SECONDS, deadline - time.monotonic() - _MIN_SECONDS))
            seconds = max(_MIN_SECONDS, deadline - time.monotonic())
            request = {"language": language, "code": code, "seconds": seconds, "max_characters": self.max_characters}
            return send(address, settings, request, seconds + _MARGIN_SECONDS)
        finally:
            if not episode:
                with contextlib.suppress(ClaimError):  # it expires; the result, or why there is none, counts
                    claims.delete(own)

    def end(self, episode: str) -> None:
        """Give the episode's sandbox back. Raise ClaimError."""
        open_claims(read_settings(), time.monotonic() + self.timeout_seconds).delete(episode)


def open_claims(settings: SandboxSettings, deadline: float) -> Claims:
    """`deadline`: of the requests, by time.monotonic()."""
    api = InClusterApi(deadline)
    return Claims(api, api.namespace, settings.pool, settings.seconds)


def read_settings(folder: str = PATH_SANDBOX) -> SandboxSettings:
    """Raise ClaimError outside of a cluster."""
    try:
        text = Path(folder, FILE_SANDBOX).read_text()
    except OSError as error:
        raise ClaimError("provider agentSandbox needs a cluster; set provider: process") from error
    return SandboxSettings(**json.loads(text))


def send(address: str, settings: SandboxSettings, request: dict[str, Any], timeout_seconds: float) -> str:
    """Return what the model sees. Raise OSError and http.client.HTTPException."""
    connection = http.client.HTTPConnection(address, settings.port, timeout=timeout_seconds)
    try:
        headers = {"Authorization": f"Bearer {settings.token}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/run", json.dumps(request), headers)
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        if response.status != 200:
            raise http.client.HTTPException(f"the sandbox answers with {response.status}: {answer.get('error')}")
        return str(answer["text"])
    finally:
        connection.close()
