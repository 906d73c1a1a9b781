"""The API server as the commands see it: RLJobs, Pods and Events as plain manifests, and logs as lines.

Refusals become a ClusterError that names the remedy.

A command in a Pod's container runs over the API server's WebSocket, as with `kubectl exec -i`. The first byte of each
message is its channel. Protocol v4 cannot close stdin, so the command must know where its input ends. Invariant: what
the command prints is read while its input is sent, or both would wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp
from kubernetes.aio.config import kube_config
from kubernetes.aio.config.config_exception import ConfigException
from yaml import YAMLError

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_api.wire.text import clean_text
from rljob_cli.exits import EXIT_FAILED
from rljob_cli.options import Target
from rljob_core.backend import Manifest
from rljob_core.kube.client import MERGE_PATCH, SSA, ApiError, KubeApi
from rljob_core.kube.client import connect as connect_api
from rljob_core.kube.resources import EVENT, POD, REWARD_MODEL, RLJOB, Resource

PROTOCOL = "v4.channel.k8s.io"
_STDIN, _STATUS = 0, 3
"""1 and 2 are stdout and stderr."""
_MAX_OUTPUT_BYTES = 64 * 1024


class Ended(NamedTuple):
    exit_code: int
    output: str
    """The first part of stdout and stderr."""


async def execute(socket: aiohttp.ClientWebSocketResponse, stdin: Iterable[bytes]) -> Ended:
    """Send the input and return how the command ended. Raise TransientError if the connection ends first."""
    sender = asyncio.create_task(_send(socket, stdin))
    try:
        return await _receive(socket)
    except TransientError:
        [failure] = await asyncio.gather(sender, return_exceptions=True)  # ends, because the socket is closed
        if isinstance(failure, RLJobError):
            raise failure from None
        raise
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


async def _send(socket: aiohttp.ClientWebSocketResponse, stdin: Iterable[bytes]) -> None:
    try:
        for chunk in stdin:
            await socket.send_bytes(bytes([_STDIN]) + chunk)
    except Exception:
        await socket.close()  # the command would wait for the rest
        raise


async def _receive(socket: aiohttp.ClientWebSocketResponse) -> Ended:
    output = b""
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or len(message.data) < 2:
            continue  # each channel starts with an empty message
        channel, data = message.data[0], message.data[1:]
        if channel == _STATUS:
            return Ended(_parse_exit_code(json.loads(data)), output.decode(errors="replace"))
        output = (output + data)[:_MAX_OUTPUT_BYTES]
    raise TransientError("the connection to the Pod ended before the command did")


def _parse_exit_code(status: dict[str, object]) -> int:
    """Return the exit code in a Status. Raise TransientError if the command did not run."""
    if status.get("status") == "Success":
        return 0
    details = status.get("details")
    for cause in details.get("causes") or [] if isinstance(details, dict) else []:
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise TransientError(f"the command did not run: {status.get('message')}")


_WORKLOADS = (
    Resource("Deployment", "apps/v1", "deployments"),
    Resource("StatefulSet", "apps/v1", "statefulsets"),
    Resource("Job", "batch/v1", "jobs"),
)
_POD_METRICS = Resource("PodMetrics", "metrics.k8s.io/v1beta1", "pods")
_BUSY_TRIES, _BUSY_SECONDS = 5, 1.0
"""For an API server that is busy, or that prepares a kind which was installed just now (429)."""
_METRICS_TIMEOUT_SECONDS = 3.0
"""Short, because a NetworkPolicy that blocks the API server drops its packets."""
_LOG_TIMEOUT_SECONDS = 30.0
_MAX_IDLE_LOG_SECONDS = 24 * 3600.0
_FIELD_MANAGER = "rljob-submit"
_MAX_TEXT_LENGTH = 10_000
"""Limit of a text in a Pod or an Event."""
_MAX_CONNECTIONS = 1000
"""Each followed log uses one."""


class ClusterError(RLJobError):
    """The cluster did not respond, or refused."""

    exit_code = EXIT_FAILED


class NotFoundError(ClusterError):
    """404: the object or its kind does not exist."""


class NotReadyError(ClusterError):
    """400: the request cannot be served now, such as the log of a container that has not started."""


@contextlib.asynccontextmanager
async def connect(target: Target) -> AsyncIterator[Cluster]:
    try:
        kubeconfig = target.kubeconfig or kube_config.KUBE_CONFIG_DEFAULT_LOCATION
        context, namespace = _choose_context(kubeconfig, target.context)
        api = await connect_api(kubeconfig, context, max_connections=_MAX_CONNECTIONS)
    # For a file that is not a kubeconfig, the library raises whatever its parsing runs into.
    except (ConfigException, OSError, YAMLError, TypeError, AttributeError, KeyError, ValueError) as error:
        is_clear = isinstance(error, ConfigException | OSError | UserError)
        unclear = f"the kubeconfig cannot be read: {' '.join(str(error).split())[:200]}"
        reason = str(error).rstrip(".") if is_clear else unclear
        remedy = "pass --kubeconfig or --context, or set KUBECONFIG"
        raise ClusterError(f"no cluster: {reason}; {remedy}") from None
    try:
        yield Cluster(api, target.namespace or namespace)
    finally:
        await api.close()


@dataclass(frozen=True)
class Cluster:
    _api: KubeApi
    namespace: str

    async def get_job(self, name: str) -> Manifest:
        """Raise UserError with similar names if the job does not exist."""
        try:
            return await self._request("get rljobs", "GET", RLJOB.path(self.namespace, name))
        except NotFoundError:
            names = [job["metadata"]["name"] for job in await self.list_jobs()]
            near = difflib.get_close_matches(name, names, cutoff=0.5) or sorted(names)[:5]
            hint = f"did you mean {' or '.join(near)}?" if near else "the namespace has no RLJobs; check -n"
            raise UserError(f"RLJob {self.namespace}/{name}: not found; {hint}") from None

    async def list_jobs(self, everywhere: bool = False) -> list[Manifest]:
        try:
            return await self._list(RLJOB, everywhere=everywhere)
        except NotFoundError:
            remedy = "install them: helm install rljob charts/rljob"
            raise ClusterError(f"the RLJob CRDs are not installed in this cluster; {remedy}") from None

    async def find(self, resource: Resource, name: str) -> Manifest | None:
        """Return an object; None if it does not exist."""
        try:
            return await self._request(f"get {resource.plural}", "GET", resource.path(self.namespace, name))
        except NotFoundError:
            return None

    async def apply(self, resource: Resource, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create or change an object by server-side apply. Return it as the API server stores it."""
        query = {"fieldManager": _FIELD_MANAGER, "force": "true"} | ({"dryRun": "All"} if dry_run else {})
        path = resource.path(self.namespace, manifest["metadata"]["name"])
        action = f"apply {resource.plural}"
        return await self._request(action, "PATCH", path, query=query, body=manifest, content_type=SSA)

    async def patch(self, resource: Resource, name: str, patch: Manifest) -> Manifest:
        path = resource.path(self.namespace, name)
        return await self._request(f"patch {resource.plural}", "PATCH", path, body=patch)

    async def delete(self, resource: Resource, name: str) -> None:
        """Delete an object, at once if it is a Pod. It need not exist."""
        query = {"gracePeriodSeconds": "0", "propagationPolicy": "Background"}
        with contextlib.suppress(NotFoundError):
            path = resource.path(self.namespace, name)
            await self._request(f"delete {resource.plural}", "DELETE", path, query=query)

    async def execute(self, pod: str, command: Sequence[str], stdin: Iterable[bytes] = ()) -> Ended:
        """Run a command in the first container of a Pod, which must not read stdin to its end."""
        query = [("stdin", "true"), ("stdout", "true"), ("stderr", "true"), *(("command", part) for part in command)]
        with self._translated("create pods/exec"):
            async with self._api.open_websocket(POD.path(self.namespace, pod, "exec"), query, PROTOCOL) as socket:
                return await execute(socket, stdin)

    @contextlib.asynccontextmanager
    async def open_port(self, pod: str, port: int) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Connect to a port of a Pod: see port_forward."""
        with self._translated("create pods/portforward"):
            path = POD.path(self.namespace, pod, "portforward")
            async with self._api.open_websocket(path, [("ports", str(port))], PROTOCOL) as socket:
                yield socket

    async def list_pods(self, selector: str) -> list[Manifest]:
        return await self._list(POD, labelSelector=selector)

    async def list_workloads(self, selector: str) -> list[Manifest]:
        return [item for resource in _WORKLOADS for item in await self._list(resource, labelSelector=selector)]

    async def list_warnings(self) -> list[Manifest]:
        return await self._list(EVENT, fieldSelector="type=Warning")

    async def list_reward_models(self) -> list[Manifest]:
        return await self._list(REWARD_MODEL)

    async def list_pod_metrics(self, selector: str) -> list[Manifest]:
        """Return CPU and memory in use. Raise ClusterError if the cluster does not serve metrics.k8s.io."""
        return await self._list(_POD_METRICS, labelSelector=selector)

    async def read_pod_metrics(self, pod: str, port: int) -> str:
        """Return a Pod's /metrics through the API server. Raise ClusterError if it or a policy refuses."""
        path = POD.path(self.namespace, f"{pod}:{port}", "proxy/metrics")
        with self._translated("get pods/proxy"):
            return await self._api.read_text(path, timeout_seconds=_METRICS_TIMEOUT_SECONDS)

    async def stream_log(
        self,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        previous: bool = False,
        since_seconds: int | None = None,
    ) -> AsyncIterator[str]:
        """Yield lines behind their timestamp until the connection ends. Raise NotReadyError if there is no log yet."""
        query = {"container": container, "timestamps": "true"}
        query |= {"follow": str(follow).lower(), "previous": str(previous).lower()}
        limits = {"tailLines": tail, "sinceSeconds": since_seconds}
        query |= {name: str(value) for name, value in limits.items() if value is not None}
        idle = _MAX_IDLE_LOG_SECONDS if follow else _LOG_TIMEOUT_SECONDS
        path = POD.path(self.namespace, pod, "log")
        with self._translated("get pods/log"):
            async with contextlib.aclosing(self._api.stream_lines(path, query, idle_timeout_seconds=idle)) as lines:
                async for line in lines:
                    yield line

    async def _list(self, resource: Resource, everywhere: bool = False, **query: str) -> list[Manifest]:
        path = resource.path(None if everywhere else self.namespace)
        answer = await self._request(f"list {resource.plural}", "GET", path, query=query)
        # The items of a list do not include their kind.
        items = [{"kind": resource.kind, **item} for item in answer.get("items") or []]
        return [_clean(item) for item in items] if resource in (POD, EVENT) else items

    async def _request(
        self,
        action: str,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = MERGE_PATCH,
    ) -> Manifest:
        with self._translated(action):
            for tries_left in reversed(range(_BUSY_TRIES)):
                try:
                    answer = await self._api.request(method, path, query=query, body=body, content_type=content_type)
                    break
                except ApiError as error:
                    if error.code != HTTPStatus.TOO_MANY_REQUESTS or not tries_left:
                        raise
                await asyncio.sleep(_BUSY_SECONDS)
        if "apiVersion" not in answer:  # most often the login page of a proxy
            remedy = "check the server URL in your kubeconfig, or log in"
            raise ClusterError(f"{action}: {self._api.server} did not return a Kubernetes API response; {remedy}")
        return answer

    @contextlib.contextmanager
    def _translated(self, action: str) -> Iterator[None]:
        """Raise errors of the client as a ClusterError. `action` is verb and resource, as RBAC names them."""
        try:
            yield
        except ApiError as error:
            raise _translate(error, action, self.namespace) from None
        except TransientError as error:
            reason = error.__cause__ or error
            problem = f"the API server {self._api.server} did not answer: {reason or type(reason).__name__}"
            raise ClusterError(f"{problem}; check that the cluster is running") from None


def _clean(value: Any) -> Any:
    """Return the same without terminal escapes: programs of Pods choose their termination messages."""
    if isinstance(value, dict):
        return {key: _clean(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_clean(child) for child in value]
    return clean_text(value, _MAX_TEXT_LENGTH) if isinstance(value, str) else value


def _choose_context(kubeconfig: str, wanted: str | None) -> tuple[str, str]:
    """Return the name and the namespace of the context. The kubeconfig need not have a current one."""
    kube_config.logger.setLevel(logging.ERROR)  # its warning says what the error below says
    merged = kube_config.KubeConfigMerger(kubeconfig).config
    if merged is None:
        raise ConfigException(f"kubeconfig {kubeconfig} not found")
    contexts = [node.value for node in merged.value["contexts"]]
    wanted = wanted or str(merged.value.get("current-context") or "")
    for context in contexts:
        if context["name"] == wanted:
            return wanted, context["context"].get("namespace") or "default"
    names = ", ".join(context["name"] for context in contexts) or "none"
    missing = f"has no context {wanted}" if wanted else "has no current context"
    raise ConfigException(f"the kubeconfig {missing}; it has {names}")


def _translate(error: ApiError, action: str, namespace: str) -> ClusterError:
    if error.code == 400:
        return NotReadyError(error.message)
    if error.code == 404:
        return NotFoundError(f"{action}: {error.message}")
    if error.code == 401:
        remedy = "log in again, or check the user in your kubeconfig"
        return ClusterError(f"unauthorized: the API server rejected your credentials; {remedy}")
    if error.code == 403:
        problem = f"forbidden: you may not {action} in namespace {namespace}"
        return ClusterError(f"{problem}; request a role that allows it: {error.message}")
    return ClusterError(f"{action}: the API server answered {error.code}: {error.message}")
