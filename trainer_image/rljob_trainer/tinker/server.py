"""The HTTP server of Tinker's wire: reads requests, finds who sends them, and writes answers and errors.

An error of a command is its result; that of another request is its answer, with a status that the SDK does not try
again. Invariant: every request is answered, and none with a stack trace.
"""

import hmac
import json
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from tinker.types.future_retrieve_request import FutureRetrieveRequest

from rljob_api.errors import UserError
from rljob_trainer.tinker.service import NOT_SUPPORTED, GoneError, Service, UnknownError
from rljob_trainer.tinker.streams import Result
from rljob_trainer.tinker.wire import RefusedError, parse

log = logging.getLogger(__name__)

_POLL_SECONDS = 20.0
"""For which a result is waited for; the SDK waits 45 s for the answer."""
_MAX_BODY_BYTES = 256 << 20
_API = "/api/v1/"
_PROTOBUF = "application/x-protobuf"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_CLIENT = web.RequestKey("client", str)


class TinkerServer:
    def __init__(self, service: Service, keys: Callable[[], Mapping[str, str]]) -> None:
        """`keys`: returns those of clients, by their names."""
        self._service, self._keys = service, keys
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        for path, fixed in (
            ("client/config", {}),
            ("client/dynamic_config", {}),
            ("telemetry", {"status": "accepted"}),
        ):
            app.router.add_post(_API + path, _answer_with(fixed))
        app.router.add_get(_API + "healthz", _answer_with({"status": "ok"}))
        app.router.add_get(_API + "get_server_capabilities", _answer_with(service.describe_server()))
        app.router.add_post(_API + "retrieve_future", self._retrieve)
        app.router.add_post(_API + "weights_info", self._weights_info)
        app.router.add_get(_API + "samplers/{id}", self._get_sampler)
        app.router.add_post(_API + "sessions/{id}/finish", self._finish)
        app.router.add_post(_API + "{path:.+}", self._accept)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

    async def start(self, host: str, port: int) -> str:
        """Listen. Return the URL. Raise UserError if the port is in use."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self.close()
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; pass another --port") from error
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Find the client, and write errors."""
        try:
            given = request.headers.get("X-API-Key", "").encode(errors="replace")
            clients = [name for name, key in self._keys().items() if hmac.compare_digest(given, key.encode())]
            if not clients:
                return _refuse(
                    401, "the key is not known here; set TINKER_API_KEY to that of `rljob serve`, or of the Secret"
                )
            request[_CLIENT] = clients[0]
            if self._service.failure:
                raise RefusedError(self._service.failure)
            return await handler(request)
        except UnknownError as error:
            return _refuse(404, str(error))
        except GoneError as error:
            return _refuse(410, str(error))
        except (RefusedError, ValueError) as error:
            return _refuse(400, str(error))
        except web.HTTPException as error:
            known = error.status not in (404, 405)
            return (
                _refuse(error.status, error.reason)
                if known
                else _refuse(400, f"{request.method} {request.path} {NOT_SUPPORTED}")
            )
        except sqlite3.Error as error:  # such as a full disk: the SDK tries again
            return _refuse(503, f"the journal cannot be written: {error}")
        except Exception:
            log.exception("the service failed to answer %s", request.path)
            return _refuse(400, "the service failed; see its log")  # the SDK would repeat one with 500 for minutes

    async def _accept(self, request: web.Request) -> web.Response:
        body = await request.read()
        return _write(self._service.accept(request[_CLIENT], request.match_info["path"], body))

    async def _weights_info(self, request: web.Request) -> web.Response:
        path = str((await request.json()).get("tinker_path"))
        return _write(self._service.describe_weights(request[_CLIENT], path))

    async def _get_sampler(self, request: web.Request) -> web.Response:
        return _write(self._service.get_sampler(request[_CLIENT], request.match_info["id"]))

    async def _finish(self, request: web.Request) -> web.Response:
        return _write(self._service.finish_session(request[_CLIENT], request.match_info["id"]))

    async def _retrieve(self, request: web.Request) -> web.Response:
        asked = parse(FutureRetrieveRequest, await request.json())
        result = await self._service.retrieve(request[_CLIENT], asked.request_id, _POLL_SECONDS)
        if result is None:
            return web.json_response({"queue_state": "active"}, status=408)
        return _write(result)


def _answer_with(body: dict[str, Any]) -> _Handler:
    async def handle(_: web.Request) -> web.Response:
        return _write(body)

    return handle


def _write(result: Result) -> web.Response:
    if isinstance(result, bytes):
        return web.Response(body=result, content_type=_PROTOBUF)
    return web.json_response(result)


def _refuse(status: int, message: str) -> web.Response:
    return web.Response(status=status, text=json.dumps({"error": message}), content_type="application/json")
