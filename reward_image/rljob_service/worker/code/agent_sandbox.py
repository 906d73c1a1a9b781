"""Provider agentSandbox of the tools that run code: a sandbox of kubernetes-sigs/agent-sandbox for each episode.

Reads what the operator mounts: warm pool, port and token. Leaves claims to sandbox_claims, and processes to
sandbox_server, which runs in the sandbox. Invariant: calls of one episode meet in one sandbox, whichever replica or
worker executes them; a call ends before the worker is killed for its time.
"""

import contextlib
import http.client
import json
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from rljob_api.wire.contract import FILE_SANDBOX, PATH_SANDBOX
from rljob_service.worker.code.sandbox_claims import ClaimError, Claims, InClusterApi

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
