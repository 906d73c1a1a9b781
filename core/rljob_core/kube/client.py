"""Requests to the API server through one session, and errors in the operator's terms.

Needs neither kopf nor the rest of the operator, so the CLI uses it too. Invariant: every request, kopf's included,
passes `hooks` and `observers`: tests can delay or fail each request, and metrics count all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import urllib.parse
import urllib.request
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import Configuration

from rljob_api.errors import TransientError, UserError
from rljob_api.wire.text import clean_text
from rljob_core.backend import Manifest, UnansweredError, utc_now
from rljob_core.json_depth import load_json
from rljob_core.kube.resources import Resource

REQUEST_TIMEOUT_SECONDS = 30.0
MAX_CONNECTIONS = 20
_CLOCK_TOLERANCE = timedelta(seconds=5)
"""A smaller difference of clocks may be the network, and changes nothing."""
"""Limit of the requests of one namespace at a time, and half of the limit of them together: its webhooks may hold each
for 30 s, and then delay no other namespace."""
MAX_MESSAGE_LENGTH = 4000
"""Limit of an error: an admission webhook may answer anything."""
PAGE_OBJECTS = 100
"""Objects per page of a LIST. One of 250 Pods, 2 MB, blocks the loop for 20 to 40 ms, and takes 9 MiB in place of 3."""
_TOKEN_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
SSA = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Accepts an object without its content, such as a Secret's data."""
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
"""Merges conditions by type."""

_NAMESPACE = re.compile("/namespaces/([^/]+)/")
_ESCAPED = re.compile("[\x7f-\uffff]")
"""What is valid JSON as an escape only: all but ASCII and the characters beyond 16 bits."""

Hook = Callable[[aiohttp.ClientRequest], Awaitable[None]]
"""Gets a request before it is sent; may wait, or raise aiohttp.ClientError to make it fail."""
OnResponse = Callable[[str, str, int], None]
"""verb, path, status code; 0 without an answer."""


class ApiError(Exception):
    """An error response of the API server. `causes` are those of its details, each with field, reason and message."""

    def __init__(self, code: int, reason: str, message: str, causes: Sequence[Manifest] = ()) -> None:
        message = clean_text(message, MAX_MESSAGE_LENGTH)
        super().__init__(message)
        self.code, self.reason, self.message, self.causes = code, reason, message, causes


class _NoConnectionError(Exception):
    """All connections wait for answers."""


class ListPage(NamedTuple):
    """One page of a LIST."""

    items: list[Manifest]
    version: str
    """The resourceVersion of the whole LIST."""


class KubeApi:
    """A client of one API server. See `connect`."""

    def __init__(
        self,
        configuration: Configuration,
        max_connections: int = MAX_CONNECTIONS,
        hooks: list[Hook] | None = None,
        observers: list[OnResponse] | None = None,
    ) -> None:
        """`hooks` and `observers`: those of another client, which share what is added later."""
        self._configuration, self._max_connections = configuration, max_connections
        self.server = configuration.host.rstrip("/")
        self.hooks: list[Hook] = [] if hooks is None else hooks
        self.observers: list[OnResponse] = [] if observers is None else observers
        self._ssl = _ssl_context(configuration)
        self._proxy = configuration.proxy or _proxy_of_environment(configuration.host)
        self.ahead = timedelta()
        """How much later this machine's clock is than the API server's, if they differ by more than a few seconds."""
        self._session: aiohttp.ClientSession | None = None
        self._all = asyncio.Semaphore(2 * max_connections)
        self._of_namespace = weakref.WeakValueDictionary[str, asyncio.Semaphore]()

    def separate(self, max_connections: int) -> KubeApi:
        """Return a client with its own connections, and the same hooks and observers."""
        return KubeApi(self._configuration, max_connections, self.hooks, self.observers)

    def new_session(
        self,
        limit: int = MAX_CONNECTIONS,
        middlewares: tuple[aiohttp.ClientMiddlewareType, ...] = (),
        response_class: type[aiohttp.ClientResponse] = aiohttp.ClientResponse,
    ) -> aiohttp.ClientSession:
        """Return a session whose requests carry the current credentials and pass the hooks."""
        connector = aiohttp.TCPConnector(limit=limit, ssl=self._ssl if self._ssl is not None else True)
        return aiohttp.ClientSession(
            connector=connector,
            middlewares=(*middlewares, self._pass),
            response_class=response_class,
            proxy=self._proxy,
        )

    async def _pass(self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        if token := await self._configuration.get_api_key_with_prefix("BearerToken", "authorization"):
            request.headers["Authorization"] = token
        verb, path = request.method, request.url.path
        try:
            for hook in self.hooks:
                await hook(request)
            response = await handler(request)
        except (aiohttp.ClientError, OSError):
            self._observe(verb, path, 0)
            raise
        self._observe(verb, path, response.status)
        return response

    def _observe(self, verb: str, path: str, code: int) -> None:
        for observer in self.observers:
            observer(verb, path, code)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Any = None,
        content_type: str = "",
        accept: str = "",
    ) -> Manifest:
        """Return the JSON of the response. Raise ApiError if the server refuses, TransientError if it is silent."""
        headers = {"Content-Type": content_type or "application/json"} if body is not None else {}
        headers |= {"Accept": accept} if accept else {}
        data = _encode_json(body) if body is not None else None
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS)
        async with self._open(method, path, params=query, data=data, headers=headers, timeout=timeout) as response:
            with contextlib.suppress(TypeError, ValueError):  # a proxy may send another date, or none
                ahead = utc_now() - parsedate_to_datetime(response.headers.get("Date", ""))
                self.ahead = ahead * (abs(ahead) > _CLOCK_TOLERANCE)
            return _parse_json(await response.read())

    async def read_text(self, path: str, *, timeout_seconds: float = REQUEST_TIMEOUT_SECONDS) -> str:
        """Return the body of a response that is not JSON, such as a proxied Pod's metrics."""
        async with self._open("GET", path, timeout=aiohttp.ClientTimeout(total=timeout_seconds)) as response:
            return (await response.read()).decode(errors="replace")

    async def stream_lines(
        self, path: str, query: dict[str, str], *, idle_timeout_seconds: float
    ) -> AsyncGenerator[str, None]:
        """Yield the lines of a response as they arrive. A connection that breaks after the first byte ends them."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=REQUEST_TIMEOUT_SECONDS, sock_read=idle_timeout_seconds
        )
        rest = b""
        async with self._open("GET", path, params=query, timeout=timeout) as response:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
                async for chunk in response.content.iter_any():
                    *whole, rest = (rest + chunk).split(b"\n")
                    for line in whole:
                        yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    @contextlib.asynccontextmanager
    async def open_websocket(
        self, path: str, query: Sequence[tuple[str, str]], protocol: str
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Connect to a subresource such as exec. Raise ApiError for a refusal, TransientError if the connection fails
        before its end."""
        if self._session is None:
            self._session = self.new_session(0)
        try:
            async with self._session.ws_connect(
                self.server + path,
                params=query,
                protocols=(protocol,),
                server_hostname=self._configuration.tls_server_name,
            ) as socket:
                yield socket
        except aiohttp.WSServerHandshakeError as error:
            raise ApiError(error.status, "", error.message) from None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise TransientError(f"{path}: the API server did not answer: {error or type(error).__name__}") from error

    @contextlib.asynccontextmanager
    async def _open(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request. Raise ApiError for a refusal, UnansweredError if it is late, and TransientError if the
        connection fails before its end."""
        if self._session is None:
            self._session = self.new_session(0)
        try:
            async with (
                self._hold_connection(path),
                self._session.request(
                    method, self.server + path, server_hostname=self._configuration.tls_server_name, **options
                ) as response,
            ):
                if response.status >= HTTPStatus.BAD_REQUEST:
                    answer = _parse_json(await response.read())
                    message = str(answer.get("message") or f"HTTP {response.status}").strip()
                    causes = (answer.get("details") or {}).get("causes") or []
                    raise ApiError(response.status, str(answer.get("reason", "")), message, causes)
                yield response
        except _NoConnectionError as error:
            raise UnansweredError(f"{method} {path}: {error}") from None
        except TimeoutError as error:
            raise UnansweredError(f"{method} {path}: the API server did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError(
                f"{method} {path}: the API server did not answer: {error or type(error).__name__}"
            ) from error

    @contextlib.asynccontextmanager
    async def _hold_connection(self, path: str) -> AsyncIterator[None]:
        """Wait until the namespace of the path, and then all together, have less than their number of requests."""
        found, num = _NAMESPACE.search(path), self._max_connections
        namespace = found[1] if found else ""
        own = self._of_namespace.setdefault(namespace, asyncio.Semaphore(num))
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_SECONDS):
                    await held.enter_async_context(own)
                    await held.enter_async_context(self._all)
            except TimeoutError:
                whose = f"{num} requests of namespace {namespace}" if own.locked() else f"{2 * num} requests"
                raise _NoConnectionError(
                    f"not sent in {REQUEST_TIMEOUT_SECONDS:g} s, since {whose} wait for their answers; see which "
                    "admission webhooks are slow"
                ) from None
            yield

    async def list_pages(self, resource: Resource, namespace: str | None) -> AsyncGenerator[ListPage, None]:
        """Yield the objects of a kind that the operator watches. All pages show the state of one resourceVersion.

        Raises ApiError with code 410 if that state is too old for the next page: the LIST must start again."""
        query = {"limit": str(PAGE_OBJECTS)} | selectors_of(resource)
        while True:
            page = await self.request("GET", resource.path(namespace), query=query)
            yield ListPage(page.get("items") or [], page["metadata"]["resourceVersion"])
            if not (token := page["metadata"].get("continue")):
                return
            del page  # at most one page in memory
            query["continue"] = token

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def selectors_of(resource: Resource) -> dict[str, str]:
    """Return the query parameters that select the objects of the operator."""
    selectors = {"labelSelector": resource.label_selector, "fieldSelector": resource.field_selector}
    return {name: value for name, value in selectors.items() if value}


async def connect(
    kubeconfig: str | None = None, context: str | None = None, *, max_connections: int = MAX_CONNECTIONS
) -> KubeApi:
    """Use the service account if no file is given and the process runs in a cluster, otherwise the kubeconfig."""
    found = Configuration()
    try:
        if kubeconfig is None and _TOKEN_FILE.exists():  # noqa: ASYNC240 - once, at the start
            config.load_incluster_config(client_configuration=found)
        else:
            await config.load_kube_config(config_file=kubeconfig, context=context, client_configuration=found)
    except (config.ConfigException, OSError) as error:
        raise UserError(
            f"cannot connect to the API server: {error}; run in a cluster, or pass --kubeconfig FILE"
        ) from error
    return KubeApi(found, max_connections)


def _proxy_of_environment(server: str) -> str | None:
    """Return the proxy that HTTPS_PROXY and NO_PROXY choose for the server, as kubectl does."""
    url = urllib.parse.urlsplit(server)
    if urllib.request.proxy_bypass(url.hostname or ""):
        return None
    return urllib.request.getproxies().get(url.scheme)


def _encode_json(body: Any) -> bytes:
    """Return JSON that is YAML, too: the API server reads an apply as YAML, which has no raw control characters and no
    surrogate pairs, as ASCII JSON has for an emoji."""
    return _ESCAPED.sub(_escape, json.dumps(body, ensure_ascii=False)).encode()


def _escape(character: re.Match[str]) -> str:
    is_surrogate = "\ud800" <= character[0] <= "\udfff"
    return "\\ufffd" if is_surrogate else f"\\u{ord(character[0]):04x}"


def _parse_json(raw: bytes) -> Manifest:
    """Return an object; empty if the body is empty or another kind of JSON."""
    try:
        answer = load_json(raw or b"{}")
    except ValueError:
        return {"message": raw.decode(errors="replace")[:300]}
    return answer if isinstance(answer, dict) else {}


def _ssl_context(found: Configuration) -> ssl.SSLContext | None:
    if not found.host.startswith("https"):
        return None
    context = ssl.create_default_context(cafile=found.ssl_ca_cert, cadata=found.ca_cert_data)
    if found.cert_file:
        context.load_cert_chain(found.cert_file, keyfile=found.key_file)
    # The default since Python 3.13 is stricter than kubectl: it rejects CAs without a key usage or key identifiers,
    # which many clusters have. Signatures, names and dates are still checked.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not found.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
