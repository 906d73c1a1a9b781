"""Probes as in a kubelet: a pure counter of thresholds, and the three kinds of probes.

Invariant: the result changes only after `failureThreshold` (or `successThreshold`) equal outcomes in a row.
"""

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from rljob_cli.local.node.podshim import SIGNAL_KILL_ALL
from rljob_cli.local.node.podspec import Process
from rljob_core.backend import Manifest

SHIM = Path(__file__).with_name("podshim.py")
_MESSAGE_CHARACTERS = 200


@dataclass
class ProbeState:
    """Counts outcomes. `passed` is None until a threshold is reached for the first time."""

    probe: Manifest
    passed: bool | None = None
    _run: int = field(default=0, repr=False)
    _last: bool | None = field(default=None, repr=False)

    @property
    def period_seconds(self) -> float:
        return float(self.probe.get("periodSeconds", 10))

    @property
    def delay_seconds(self) -> float:
        return float(self.probe.get("initialDelaySeconds", 0))

    def record(self, success: bool) -> bool | None:
        self._run = self._run + 1 if success == self._last else 1
        self._last = success
        threshold = self.probe.get("successThreshold", 1) if success else self.probe.get("failureThreshold", 3)
        if self._run >= threshold:
            self.passed = success
        return self.passed


async def run_probe(probe: Manifest, address: str, ports: dict[str, int], process: Process) -> str:
    """Run the probe once. Return '' for success, else the error."""
    timeout = float(probe.get("timeoutSeconds", 1))
    try:
        async with asyncio.timeout(timeout):
            if "httpGet" in probe:
                return await _http(probe["httpGet"], address, ports)
            if "exec" in probe:
                return await _exec(process)
            if "tcpSocket" in probe:
                port = _port(probe["tcpSocket"]["port"], ports)
                _, writer = await asyncio.open_connection(probe["tcpSocket"].get("host") or address, port)
                writer.close()
                return ""
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except (OSError, aiohttp.ClientError) as error:
        return str(error) or type(error).__name__
    return f"the probe has none of httpGet, tcpSocket, exec: {probe}"


async def _http(action: Manifest, address: str, ports: dict[str, int]) -> str:
    origin = f"{action.get('scheme', 'HTTP').lower()}://{action.get('host') or address}:{_port(action['port'], ports)}"
    url = f"{origin}/{action.get('path', '/').lstrip('/')}"
    headers = {header["name"]: header["value"] for header in action.get("httpHeaders", [])}
    # A session per probe, because an idle connection would hide a dead server. A kubelet opens one per probe, too.
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers, ssl=False) as response:
        if 200 <= response.status < 400:
            return ""
        body = (await response.content.read(_MESSAGE_CHARACTERS)).decode(errors="replace")
        return f"HTTP {response.status}: {body.strip()}"


async def _exec(process: Process) -> str:
    running = await spawn(process, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await running.communicate()
    finally:
        if running.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                running.send_signal(SIGNAL_KILL_ALL)
            await running.wait()
    return "" if running.returncode == 0 else output.decode(errors="replace")[:_MESSAGE_CHARACTERS] or "exit code not 0"


async def spawn(process: Process, stdout: int, cwd: Path | None = None) -> asyncio.subprocess.Process:
    """Start a process under a shim, in a new session, so that Ctrl-C reaches only this program."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        str(SHIM),
        str(os.getpid()),
        *process.argv,
        env=process.env,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


def _port(port: int | str, ports: dict[str, int]) -> int:
    return int(port) if not isinstance(port, str) or port.isdigit() else ports[port]
