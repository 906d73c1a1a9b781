"""A real reward server process for tests."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from rljob_api.wire.calls import CallResult
from rljob_api.wire.scores import GroupResult
from tests.support.waiting import DEADLINE_SECONDS

TOKEN = "secret"
_numbers = itertools.count(1)


def build_group(*completions: str, name: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return a GroupRequest. `lane` and `results` are fields of the group, other `fields` of each sample."""
    name = name or f"g{next(_numbers)}"
    group_fields = {key: fields.pop(key) for key in ("lane", "results") if key in fields}
    shared = {"prompt": "2+2?", "ground_truth": "4", **fields}
    samples = [{"id": f"{name}/{i}", "completion": text, **shared} for i, text in enumerate(completions)]
    return {"id": name, "samples": samples, **group_fields}


class Server:
    """One running `python -m rljob_service`."""

    def __init__(
        self,
        folder: Path,
        host: str,
        arguments: list[str],
        environment: dict[str, str],
        python: str = sys.executable,
        user: int | None = None,
        group: int | None = None,
    ) -> None:
        """`group` is the user's by default."""
        self.host = host
        self.log = folder / "log"
        command = [python, "-m", "rljob_service", "--config", str(folder / "service.yaml"), *arguments]
        environment = {**os.environ, "RLJOB_TOKEN": TOKEN, "RLJOB_POD_IP": host, **environment}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=log,
                user=user,
                group=user if group is None else group,
                extra_groups=user and [],
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def request(self, method: str, path: str, body: Any = None, token: str = TOKEN) -> tuple[int, Any, dict[str, str]]:
        """Return status, body (parsed if it is JSON) and headers."""
        connection = http.client.HTTPConnection(self.host, 8080, timeout=DEADLINE_SECONDS)
        with contextlib.closing(connection):
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, content, {"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            text = response.read()
        kind = response.headers.get("content-type", "")
        return response.status, json.loads(text) if "json" in kind else text.decode(), dict(response.headers)

    def score(self, completion: str, **fields: Any) -> Any:
        """Return the ScoreResult of one request; its status must be 200."""
        request = {"id": f"r{next(_numbers)}", "prompt": "2+2?", "completion": completion, **fields}
        status, result, _ = self.request("POST", "/v1/score", request)
        assert status == 200, f"{status}: {result}"
        return result

    def call(self, arguments: dict[str, Any], function: str = "", **fields: Any) -> Any:
        """Return the CallResult of one call; its status must be 200."""
        request = {"id": f"c{next(_numbers)}", "function": function, "arguments": arguments, **fields}
        status, result, _ = self.request("POST", "/v1/call", request)
        assert status == 200, f"{status}: {result}"
        CallResult.model_validate(result)
        return result

    def score_group(self, request: dict[str, Any]) -> GroupResult:
        """Return the GroupResult of a request; its status must be 200."""
        status, answer, _ = self.request("POST", "/v1/score-group", request)
        assert status == 200, f"{status}: {answer}"
        result = GroupResult.model_validate(answer)
        assert result.id == request["id"]
        assert [each.id for each in result.results] == [sample["id"] for sample in request["samples"]]
        return result

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log.read_text()}")
        with contextlib.suppress(OSError):
            return self.request("GET", "/rljob/ready", token="none")[0] == 200
        return False

    def metric(self, line: str) -> float:
        """Return the value of the first metric whose line starts with `line`; 0 if there is none."""
        text = self.request("GET", "/metrics", token="none")[1]
        return next((float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line)), 0.0)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
