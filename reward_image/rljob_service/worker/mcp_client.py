"""Tools of an MCP server: agent.tools[].mcp. The official SDK speaks the protocol.

Each worker keeps one session, and with a command one process of the server, so that calls at the same time do not
disturb each other. The server's schemas are what the model sees, and the server checks the arguments.

    the server returns an error          a message for the model: the server has read the call
    the session breaks, or ends          the call failed, and may be retried. Over HTTP the next call connects again; a
                                         process ends with its worker, which is replaced
    the server takes too long            timeoutSeconds ends the worker, as with a function

The SDK is a requirement of the tool, and not of this package.
"""

import asyncio
import json
import os
import shutil
import string
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rljob_api.errors import UserError
from rljob_api.wire.contract import MAX_TOOL_RESULT_CHARACTERS
from rljob_service.worker.forms.json_values import to_text
from rljob_service.worker.forms.outcome import BAD_REQUEST, EXCEPTION, CallOutcome, failed_call

_HTTP_SECONDS = 30.0
"""To connect and to send. An answer may take as long as the call."""
_MAX_PAGES = 100
"""Limit of the list of tools."""


class McpTools:
    """The tools of one server. Made once for each worker. Raise UserError if it cannot be used."""

    def __init__(
        self,
        url: str | None = None,
        headers: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
        functions: Sequence[str] = (),
    ) -> None:
        """`url` or `command`: where it listens, or how it is started. `functions`: names of the tools that the model
        sees; empty: all."""
        self._url, self._command = url, list(command)
        self._headers = _fill_in(headers or {})
        self._name = url or " ".join(command)
        self._loop = asyncio.new_event_loop()
        self._session: _Session | None = None
        try:
            self.schemas = self._loop.run_until_complete(self._list_tools(functions))
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"the MCP server {self._name} cannot be used: {_describe(error)}; start it, or correct mcp"
            ) from error
        self.problem = ""
        """Why this worker must be replaced."""

    def call(self, request: dict[str, Any]) -> CallOutcome:
        """Call a tool of the server."""
        name = request.get("function", "")
        known = [schema["name"] for schema in self.schemas]
        if name not in known:
            return failed_call(BAD_REQUEST, f"unknown function {name[:100]}. Available functions: {', '.join(known)}")
        try:
            return self._loop.run_until_complete(self._call(name, request["arguments"]))
        except Exception as error:
            self._loop.run_until_complete(self._disconnect())
            if self._command:
                self.problem = f"the session with the MCP server {self._name} has ended"
            return failed_call(EXCEPTION, f"the MCP server {self._name} failed: {_describe(error)}")

    async def _call(self, name: str, arguments: dict[str, Any]) -> CallOutcome:
        client = await self._connect()
        result = await client.call_tool(name, arguments)
        text = to_text(_read_content(result), MAX_TOOL_RESULT_CHARACTERS)
        return failed_call(BAD_REQUEST, text) if result.is_error else CallOutcome(text)

    async def _list_tools(self, functions: Sequence[str]) -> list[dict[str, Any]]:
        client = await self._connect()
        tools: dict[str, Any] = {}
        cursor = None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools |= {tool.name: tool for tool in page.tools}
            cursor = page.next_cursor
            if not cursor:
                break
        missing = [name for name in functions if name not in tools]
        if missing or not tools:
            what = f"has no tool {', '.join(missing)}" if missing else "has no tools"
            raise UserError(f"the MCP server {self._name} {what}; it has {', '.join(tools) or 'none'}")
        return [
            {"name": name, "description": tools[name].description or "", "parameters": tools[name].input_schema}
            for name in functions or tools
        ]

    async def _connect(self) -> Any:
        if self._session is None:
            self._session = _Session(self._open())
        return await self._session.wait()

    async def _disconnect(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> Any:
        """Return a client of the SDK, which connects when it is entered."""
        if self._url is None:
            program, *arguments = self._command
            program = _find_program(program)
            import mcp  # here, since the SDK takes long to import, and only workers of such tools have it

            return mcp.Client(mcp.StdioServerParameters(command=program, args=arguments, env=dict(os.environ)))
        import httpx2
        import mcp
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(_HTTP_SECONDS, read=None)
        http = httpx2.AsyncClient(headers=self._headers, timeout=timeout)
        return mcp.Client(streamable_http_client(self._url, http_client=http))


class _Session:
    """Enters and leaves a client in one task, which the SDK requires, while calls come from others."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    async def wait(self) -> Any:
        """Return the client once it is connected."""
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # the call has reported it

    async def _hold(self) -> None:
        try:
            async with self._client as client:
                self._ready.set_result(client)
                await asyncio.get_running_loop().create_future()  # until close
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error if isinstance(error, Exception) else ConnectionError(str(error)))
            raise


def _find_program(name: str) -> str:
    """Return the path of the server's program. Those of the requirements are next to the worker's interpreter."""
    own = os.path.dirname(sys.executable)
    found = shutil.which(name, path=os.pathsep.join((own, os.environ.get("PATH", os.defpath))))
    if found is None:
        raise UserError(f"mcp.command: {name} was not found; add its package to mcp.requirements, or to the image")
    return found


def _fill_in(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers with ${NAME} replaced by the tool's environment. Raise UserError for a missing variable."""
    filled = {}
    for name, value in headers.items():
        try:
            filled[name] = string.Template(value).substitute(os.environ)
        except KeyError as error:
            raise UserError(f"mcp.headers.{name}: the variable {error} is not set; add it to env of the tool") from None
        except ValueError:
            raise UserError(f"mcp.headers.{name}: must have variables as ${{NAME}}, and $$ for a dollar") from None
    return filled


def _read_content(result: Any) -> str:
    """Return the text of a result. Parts that are not text are named."""
    texts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _describe(error: BaseException) -> str:
    """Return the cause of an error. Task groups wrap it."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
