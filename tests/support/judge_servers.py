"""Real reward servers of kind judge before somebody else's endpoint. The latter is played; the former is not."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.support.fake_endpoint import Endpoint
from tests.support.reward_process import Server, wait_for

_numbers = itertools.count(1)
_BLOCK = f"127.77.{1 + os.getpid() % 250}"


def new_address() -> str:
    return f"{_BLOCK}.{next(_numbers) % 250 + 1}"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Any]:
    running = Endpoint(new_address())
    yield running
    running.close()


@pytest.fixture(scope="module")
def start_judge(tmp_path_factory: pytest.TempPathFactory, endpoint: Any) -> Iterator[Callable[..., Server]]:
    """start_judge(judge={}, environment={}, wait=True, **fields of the Reward): the smallest judge with changes."""
    servers: list[Server] = []

    def start(
        judge: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        wait: bool = True,
        host: str | None = None,
        **fields: Any,
    ) -> Server:
        judge = judge or {}
        given = {"url": endpoint.url, "model": "gpt-judge", **judge.pop("endpoint", {})}
        smallest = {"template": "Rate: {{ completion }}", "parser": {"regex": r"Score: (\S+)"}, "endpoint": given}
        reward = {"name": "test", "judge": {**smallest, **judge}, "timeoutSeconds": 20, **fields}
        folder = tmp_path_factory.mktemp("judge")
        (folder / "reward.yaml").write_text(yaml.safe_dump(reward))
        server = Server(folder, host or new_address(), ["--grace", "2"], environment or {})
        servers.append(server)
        if wait:
            wait_for(server.is_ready, "the server to be ready")
        return server

    yield start
    for server in servers:
        server.stop()
