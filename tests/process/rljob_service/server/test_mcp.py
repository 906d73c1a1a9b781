"""Servers of tools in front of real MCP servers, over stdin and stdout and over HTTP: each failure costs its call."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_api.manifest.services.tool import McpServer
from rljob_api.wire.calls import ToolSchema
from rljob_api.wire.contract import ExitCode
from tests.support.reward_process import Server
from tests.support.waiting import wait_for

StartServer = Callable[..., Server]

TOOLS = """
import os, sys, time
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("test")

@server.tool()
def add(a: int, b: int = 1) -> int:
    "Adds two numbers."
    return a + b

@server.tool()
def process() -> str:
    return f"{os.getpid()} {os.environ.get('REGION', '')}"

@server.tool()
def key(context: Context) -> str:
    return context.headers.get("authorization", "")

@server.tool()
def fail() -> str:
    raise ValueError("no such city")

@server.tool()
def large() -> str:
    return "x" * 1_500_000

@server.tool()
def hang() -> str:
    time.sleep(1000)

@server.tool()
def end() -> str:
    os._exit(3)

@server.tool()
def babble() -> str:
    for number in range(2000):
        os.write(1, b"{ not json\\n")
    return "said"

if len(sys.argv) > 1:
    server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run()
"""


@pytest.fixture(scope="module")
def script() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # a worker may have a /tmp and a user of its own
        path = Path(folder, "tools.py")
        path.write_text(TOOLS)
        path.parent.chmod(0o755)
        yield path


def build_function(**server: Any) -> dict[str, Any]:
    """Return the function of a tool's server, which has the SDK installed."""
    function = McpServer.model_validate(server).as_function()
    changed = function.model_copy(update={"requirements": [], "spare_workers": 0})
    return changed.model_dump(mode="json", by_alias=True, exclude_defaults=True)


class HttpServer:
    """An MCP server over HTTP that ends and starts again."""

    def __init__(self, script: Path) -> None:
        self._script = script
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(self._script), str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self._listens, "the MCP server to listen")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False


@pytest.fixture(scope="module")
def http_server(script: Path) -> Iterator[HttpServer]:
    server = HttpServer(script)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def stdio(start_server: StartServer, script: Path) -> Server:
    function = build_function(command=["python", str(script)])
    return start_server(None, ["--serves", "tools"], slots=1, timeoutSeconds=60, function=function)


@pytest.fixture(scope="module")
def http(start_server: StartServer, http_server: HttpServer) -> Server:
    function = build_function(
        url=f"http://127.0.0.1:{http_server.port}/mcp",
        headers={"Authorization": "Bearer ${SEARCH_KEY}"},
        functions=["add", "key", "fail", "large", "end"],
    )
    environment = {"SEARCH_KEY": "secret-7", "RLJOB_CONTAINER_ENV": "SEARCH_KEY"}
    arguments = ["--serves", "tools"]
    return start_server(None, arguments, environment=environment, slots=1, timeoutSeconds=60, function=function)


@pytest.fixture(params=["stdio", "http"])
def tools(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(request.param)
    return server


def test_schemas_are_those_of_the_mcp_server(tools: Server) -> None:
    info = tools.request("GET", "/v1/info")[1]
    add = ToolSchema.model_validate(info["tools"][0])
    assert (add.name, add.description) == ("add", "Adds two numbers.")
    assert add.parameters["properties"]["a"]["type"] == "integer"
    assert add.parameters["required"] == ["a"]


def test_only_the_named_tools_are_shown(http: Server) -> None:
    assert [tool["name"] for tool in http.request("GET", "/v1/info")[1]["tools"]] == [
        *("add", "key", "fail", "large", "end")
    ]
    assert http.call({}, "process")["reason"] == "bad_request"


def test_calls_go_to_the_mcp_server(tools: Server) -> None:
    result = tools.call({"a": 2, "b": 3}, "add")
    assert (result["valid"], result["value"]) == (True, "5"), result
    assert tools.call({"a": 2}, "add")["value"] == "3"


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("fail", {}, "Error executing tool fail"),
        ("add", {"a": "two"}, "valid integer"),
        ("ad", {}, "unknown function ad. Available functions: add"),
    ],
)
def test_an_error_of_the_tool_is_a_message_for_the_model(
    tools: Server, function: str, arguments: dict[str, Any], message: str
) -> None:
    result = tools.call(arguments, function)
    assert (result["valid"], result["reason"]) == (False, "bad_request"), result
    assert message in result["message"]


def test_a_large_result_is_cut(tools: Server) -> None:
    assert len(tools.call({}, "large")["value"]) == 1_000_000


def test_headers_have_the_secrets_of_the_environment(http: Server) -> None:
    assert http.call({}, "key")["value"] == "Bearer secret-7"


def test_a_worker_keeps_its_process_and_replaces_one_that_ended(stdio: Server) -> None:
    first = stdio.call({}, "process")["value"]
    assert stdio.call({}, "process")["value"] == first

    result = stdio.call({}, "end")
    assert (result["valid"], result["reason"]) == (False, "exception"), result
    assert "failed: MCPError: Connection closed" in result["message"]

    assert stdio.call({}, "process")["value"] != first
    assert stdio.call({"a": 1}, "add")["value"] == "2"


def test_output_that_is_not_the_protocol_is_passed_over(stdio: Server) -> None:
    assert stdio.call({}, "babble")["value"] == "said"
    assert stdio.call({"a": 1}, "add")["value"] == "2"


def test_a_server_that_ended_costs_its_calls_until_it_listens_again(http: Server, http_server: HttpServer) -> None:
    assert http.call({}, "end")["reason"] == "exception"
    http_server.process.wait()
    result = http.call({"a": 1}, "add")
    assert (result["valid"], result["reason"]) == (False, "exception"), result

    http_server.start()

    assert http.call({"a": 1}, "add")["value"] == "2"


@pytest.mark.slow
def test_a_call_that_hangs_is_ended_with_its_process(start_server: StartServer, script: Path) -> None:
    function = build_function(command=["python", str(script)])
    server = start_server(None, ["--serves", "tools"], slots=1, timeoutSeconds=2, function=function)

    assert server.call({}, "hang")["reason"] == "timeout"
    assert server.call({"a": 1}, "add")["value"] == "2"


@pytest.mark.slow
def test_a_server_that_does_not_listen_is_an_error_of_the_user(start_server: StartServer) -> None:
    function = build_function(url="http://127.0.0.1:1/mcp")
    server = start_server(None, ["--serves", "tools"], wait=False, slots=1, function=function)
    assert server.process.wait() == ExitCode.USER
    assert "the MCP server http://127.0.0.1:1/mcp cannot be used: ConnectError" in server.log.read_text()


@pytest.mark.slow
def test_a_tool_that_the_server_does_not_have_is_an_error_of_the_user(start_server: StartServer, script: Path) -> None:
    function = build_function(command=["python", str(script)], functions=["add", "search"])
    server = start_server(None, ["--serves", "tools"], wait=False, slots=1, function=function)
    assert server.process.wait() == ExitCode.USER
    assert "has no tool search; it has add, process" in server.log.read_text()


@pytest.mark.slow
def test_a_program_that_does_not_speak_the_protocol_is_an_error_of_the_user(start_server: StartServer) -> None:
    function = build_function(command=["python", "-c", "print('hello')"])
    server = start_server(None, ["--serves", "tools"], wait=False, slots=1, function=function)
    assert server.process.wait() == ExitCode.USER
    assert "cannot be used: MCPError: Connection closed" in server.log.read_text()


@pytest.mark.slow
def test_a_published_server_is_installed_and_called(start_server: StartServer) -> None:
    server = McpServer(command=["mcp-server-time"], requirements=["mcp-server-time==2026.10.19"])
    function = server.as_function().model_dump(mode="json", by_alias=True, exclude_defaults=True)
    time = start_server(None, ["--serves", "tools"], slots=1, function=function)

    asked = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    assert "+9.0h" in time.call(asked, "convert_time")["value"]
    assert "Invalid timezone" in time.call({"timezone": "Nowhere"}, "get_current_time")["message"]
