"""Real reward servers for tests: each is a process on a separate loopback address and ends with its module."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.support.reward_process import Server
from tests.support.waiting import wait_for

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """start_server(source, arguments=[], wait=True, environment={}, **fields of the Reward as in YAML).

    Without a source, the field `function` has it.
    """
    servers: list[Server] = []

    def start(
        source: str | None,
        arguments: list[str] | None = None,
        wait: bool = True,
        environment: dict[str, str] | None = None,
        **fields: Any,
    ) -> Server:
        folder = tmp_path_factory.mktemp("reward")
        function = ({"inline": source} if source is not None else {}) | fields.pop("function", {})
        (folder / "service.yaml").write_text(yaml.safe_dump({"name": "test", "function": function, **fields}))
        host = f"127.10.{1 + os.getpid() % 200}.{next(_numbers) % 250 + 1}"
        server = Server(folder, host, ["--grace", "10", *(arguments or [])], environment or {})
        servers.append(server)
        if wait:
            wait_for(server.is_ready, "the server to be ready")
        return server

    yield start
    for server in servers:
        server.process.terminate()  # all at once; no effect on one that has ended
    for server in servers:
        server.stop()
