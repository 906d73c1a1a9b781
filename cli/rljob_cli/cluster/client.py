"""The API server as the commands see it: RLJobs, Pods and Events as plain manifests, and logs as lines.

Turns what the API server refuses into a ClusterError that names the remedy; decides nothing about jobs.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config import kube_config
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError
from yaml import YAMLError

from rljob_api import API_GROUP, API_VERSION
from rljob_api.errors import RLJobError, UserError

Manifest = dict[str, Any]
_PLURAL = "rljobs"
_VERSION = API_VERSION.rpartition("/")[2]
_CONTENT_TYPE = "application/merge-patch+json"
_TIMEOUT_SECONDS = 30
_METRICS_TIMEOUT_SECONDS = 3
"""A NetworkPolicy that lets nothing in from the API server drops packets."""
_MAX_IDLE_STREAM_SECONDS = 24 * 3600
_MAX_CONNECTIONS = 1000
"""Each followed log holds one."""
_NO_RETRIES = False


class ClusterError(RLJobError):
    """The cluster could not be asked, or refused."""


@dataclass(frozen=True)
class Target:
    """Which cluster and namespace, as kubectl's options name them. None: what the kubeconfig says."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None


class Cluster:
    """One cluster, one namespace."""

    def __init__(self, target: Target) -> None:
        try:
            self._api, context_namespace = _connect(target)
        # A file that is no kubeconfig is told by whatever it makes of the library.
        except (ConfigException, OSError, YAMLError, TypeError, AttributeError, KeyError, ValueError) as error:
            is_told = isinstance(error, ConfigException | OSError)
            words = str(error).rstrip(".") if is_told else f"the kubeconfig cannot be read: {_shorten(error)}"
            raise ClusterError(f"no cluster: {words}. Name one with --kubeconfig, --context or KUBECONFIG") from None
        self.namespace = target.namespace or context_namespace
        self._jobs = client.CustomObjectsApi(self._api)
        self._core = client.CoreV1Api(self._api)
        self._apps = client.AppsV1Api(self._api)
        self._batch = client.BatchV1Api(self._api)

    def get_job(self, name: str) -> Manifest:
        """Raises UserError with near names when there is no such job."""

        def ask() -> Any:
            return self._jobs.get_namespaced_custom_object(*self._place(), name=name, _request_timeout=_TIMEOUT_SECONDS)

        try:
            found: Manifest = self._ask("get rljobs", ask)
            return found
        except NotFoundError:
            names = [job["metadata"]["name"] for job in self.list_jobs()]
            raise UserError(_describe_missing(self.namespace, name, names)) from None

    def list_jobs(self, everywhere: bool = False) -> list[Manifest]:
        def ask() -> Any:
            if everywhere:
                return self._jobs.list_cluster_custom_object(
                    API_GROUP, _VERSION, _PLURAL, _request_timeout=_TIMEOUT_SECONDS
                )
            return self._jobs.list_namespaced_custom_object(*self._place(), _request_timeout=_TIMEOUT_SECONDS)

        try:
            return list(self._ask("list rljobs", ask).get("items") or [])
        except NotFoundError:
            raise ClusterError(
                "the cluster knows no RLJobs: their CRDs are missing. Install them: helm install rljob charts/rljob"
            ) from None

    def patch_job(self, name: str, patch: Manifest) -> None:
        def ask() -> Any:
            return self._jobs.patch_namespaced_custom_object(
                *self._place(), name=name, body=patch, _content_type=_CONTENT_TYPE, _request_timeout=_TIMEOUT_SECONDS
            )

        self._ask("patch rljobs", ask)

    def list_pods(self, selector: str, everywhere: bool = False) -> list[Manifest]:
        if everywhere:
            return self._list("Pod", self._core.list_pod_for_all_namespaces, label_selector=selector)
        return self._list_here("Pod", self._core.list_namespaced_pod, label_selector=selector)

    def list_workloads(self, selector: str) -> list[Manifest]:
        """Deployments, StatefulSets and Jobs."""
        found = self._list_here("Deployment", self._apps.list_namespaced_deployment, label_selector=selector)
        found += self._list_here("StatefulSet", self._apps.list_namespaced_stateful_set, label_selector=selector)
        return found + self._list_here("Job", self._batch.list_namespaced_job, label_selector=selector)

    def list_warnings(self) -> list[Manifest]:
        return self._list_here("Event", self._core.list_namespaced_event, field_selector="type=Warning")

    def list_claims(self) -> list[Manifest]:
        return self._list_here("PersistentVolumeClaim", self._core.list_namespaced_persistent_volume_claim)

    def list_reward_models(self) -> list[Manifest]:
        def ask() -> Any:
            return self._jobs.list_namespaced_custom_object(
                API_GROUP, _VERSION, self.namespace, "rewardmodels", _request_timeout=_TIMEOUT_SECONDS
            )

        return list(self._ask("list rewardmodels", ask)["items"])

    def list_pod_metrics(self, selector: str) -> list[Manifest]:
        """What metrics.k8s.io says of Pods. Raises ClusterError where the cluster has none."""

        def ask() -> Any:
            return self._jobs.list_namespaced_custom_object(
                "metrics.k8s.io",
                "v1beta1",
                self.namespace,
                "pods",
                label_selector=selector,
                _request_timeout=_TIMEOUT_SECONDS,
            )

        return list(self._ask("list pods.metrics.k8s.io", ask)["items"])

    def read_pod_metrics(self, pod: str, port: int) -> str:
        """A Pod's own /metrics, through the API server. Raises ClusterError where it, or a policy, says no."""

        def ask() -> Any:
            return self._core.connect_get_namespaced_pod_proxy_with_path(
                f"{pod}:{port}",
                self.namespace,
                "metrics",
                _preload_content=False,
                _request_timeout=_METRICS_TIMEOUT_SECONDS,
            )

        text: str = self._ask("get pods/proxy", ask).data.decode(errors="replace")
        return text

    def open_log(
        self,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        previous: bool = False,
        since_seconds: int | None = None,
    ) -> Iterator[str]:
        """Lines with their time in front, as they come. NotReadyError when the container has no log (yet)."""

        def ask() -> Any:
            return self._core.read_namespaced_pod_log(
                pod,
                self.namespace,
                container=container,
                follow=follow,
                previous=previous,
                tail_lines=tail,
                since_seconds=since_seconds,
                timestamps=True,
                _preload_content=False,
                _request_timeout=(_TIMEOUT_SECONDS, _MAX_IDLE_STREAM_SECONDS if follow else _TIMEOUT_SECONDS),
            )

        response = self._ask("get pods/log", ask)
        return _lines(response)

    def _list_here(self, kind: str, method: Callable[..., Any], **options: Any) -> list[Manifest]:
        return self._list(kind, functools.partial(method, self.namespace), **options)

    def _list(self, kind: str, method: Callable[..., Any], **options: Any) -> list[Manifest]:
        def ask() -> Any:
            return json.loads(method(_preload_content=False, _request_timeout=_TIMEOUT_SECONDS, **options).data)

        answer = self._ask(f"list {kind}s", ask)
        # The items of a list do not say what they are.
        return [{"kind": kind, **item} for item in answer.get("items") or []]

    def _place(self) -> tuple[str, str, str, str]:
        return API_GROUP, _VERSION, self.namespace, _PLURAL

    def _ask(self, what: str, ask: Callable[[], Any]) -> Any:
        host = self._api.configuration.host
        try:
            found = ask()
        except ApiException as error:
            raise _translate(error, what, self.namespace) from None
        except HTTPError as error:
            raise ClusterError(f"the API server {host} does not answer: {error}. Is the cluster up?") from None
        except ValueError:
            found = None
        if found is None or isinstance(found, str):  # a proxy's page to log in, mostly
            raise ClusterError(
                f"{what}: {host} answers as no API server does. Check the kubeconfig's server, or log in"
            )
        return found


class NotFoundError(ClusterError):
    """404: the object, or its kind, is not there."""


class NotReadyError(ClusterError):
    """400: what was asked cannot be answered now, such as for the log of a container that has not started."""


def _lines(response: Any) -> Iterator[str]:
    """A connection that breaks ends the lines, as the end of the container does."""
    rest = b""
    try:
        for chunk in response.stream():
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace")
    except (HTTPError, OSError):
        pass
    finally:
        response.release_conn()
    if rest:
        yield rest.decode(errors="replace")


def _connect(target: Target) -> tuple[Any, str]:
    contexts, current = _read_contexts(target)
    wanted = target.context or current
    chosen = next((c for c in contexts if c["name"] == wanted), None)
    if chosen is None:
        names = ", ".join(c["name"] for c in contexts) or "none"
        missing = f"has no context {wanted}" if wanted else "has no current context"
        raise ConfigException(f"the kubeconfig {missing}; it has {names}")
    api = config.new_client_from_config(config_file=target.kubeconfig, context=chosen["name"])
    api.configuration.retries = _NO_RETRIES
    api.configuration.connection_pool_maxsize = _MAX_CONNECTIONS
    return client.ApiClient(api.configuration), chosen["context"].get("namespace") or "default"


def _read_contexts(target: Target) -> tuple[list[Manifest], str]:
    """All contexts, and the name of the current one, which there need not be: list_kube_config_contexts wants it to."""
    path = target.kubeconfig or kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    merged = kube_config.KubeConfigMerger(path).config
    if merged is None:
        raise ConfigException(f"there is no kubeconfig {path}")
    return [node.value for node in merged.value["contexts"]], str(merged.value.get("current-context") or "")


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _translate(error: ApiException, what: str, namespace: str) -> ClusterError:
    try:
        message = json.loads(error.body or "{}").get("message") or error.reason
    except ValueError:
        message = error.reason
    if error.status == 404:
        return NotFoundError(f"{what}: {message}")
    if error.status == 400:
        return NotReadyError(message)
    if error.status == 403:
        return ClusterError(
            f"forbidden: you may not {what} in namespace {namespace}. Ask for a role with it: {message}"
        )
    if error.status == 401:
        return ClusterError("the API server does not know you: log in again, or check the kubeconfig's user")
    return ClusterError(f"{what}: the API server answered {error.status}: {message}")


def _describe_missing(namespace: str, name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, cutoff=0.5) or sorted(names)[:5]
    hint = f"Did you mean {' or '.join(near)}?" if near else "The namespace has none; is -n right?"
    return f"RLJob {namespace}/{name}: there is no such job. {hint}"
