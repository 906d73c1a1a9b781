"""An operator as a process: its memory and CPU, its metrics, and the probe that a kubelet would run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

_START_SECONDS = 60.0
_PROBE_SECONDS, _PROBE_TIMEOUT_SECONDS = 10.0, 5.0
_FAILURE_THRESHOLD = 3
"""The timeout is the chart's; a kubelet probes every 10 s unless a Pod says otherwise."""
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Command:
    """How to start an operator, and where it serves."""

    name: str
    arguments: Sequence[str]
    metrics_url: str
    health_url: str
    ready_url: str
    environment: dict[str, str] = field(default_factory=dict)


class OperatorProcess:
    """Runs until `stop`. `kill` is a kill -9; `start` then starts the next one."""

    def __init__(self, command: Command, log: Path) -> None:
        self.command, self._log = command, log
        self.start()

    def start(self) -> None:
        self.started_at = time.monotonic()
        with self._log.open("ab") as file:
            self._process = psutil.Popen(
                self.command.arguments,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | self.command.environment,
            )

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(psutil.TimeoutExpired):
                self._process.wait(10)
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()
        self._process.wait()

    def check(self) -> None:
        if (code := self._process.poll()) is not None:
            sys.exit(f"{self.command.name} ended with exit code {code}:\n{self._log.read_text()[-2000:]}")

    async def wait_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(OSError):
                await asyncio.to_thread(_get, self.command.ready_url)
                return
            await asyncio.sleep(0.1)
        sys.exit(f"{self.command.name} was not ready after {_START_SECONDS:.0f} s:\n{self._log.read_text()[-2000:]}")

    def cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def rss_mib(self) -> float:
        return round(self._process.memory_info().rss / 2**20, 1)

    def peak_mib(self) -> float:
        """The most memory of this process so far."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return round(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024, 1)  # type: ignore[index]

    async def samples(self) -> list[Sample]:
        text = await asyncio.to_thread(_get, self.command.metrics_url)
        matches = filter(None, map(_SAMPLE.match, text.splitlines()))
        return [Sample(m[1], dict(_LABEL.findall(m[2] or "")), float(m[3])) for m in matches]


class Prober:
    """Probes an operator's liveness as a kubelet does, without ending it. Blocked probes are failures."""

    def __init__(self, operator: OperatorProcess) -> None:
        self._operator = operator
        self.num_failures = self.num_probes = self._in_a_row = 0
        self.killed_after_seconds: float | None = None
        self.failures: list[str] = []

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_SECONDS)
        started_at = time.monotonic()
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await asyncio.sleep(_PROBE_SECONDS)
                self._record(await self._probe(session), time.monotonic() - started_at)

    async def _probe(self, session: aiohttp.ClientSession) -> str:
        try:
            async with session.get(self._operator.command.health_url) as response:
                return "" if response.status == 200 else f"HTTP {response.status}: {(await response.text())[:100]}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"

    def _record(self, problem: str, seconds: float) -> None:
        self.num_probes += 1
        self._in_a_row = self._in_a_row + 1 if problem else 0
        if problem:
            self.num_failures += 1
            self.failures.append(f"after {seconds:.0f} s: {problem}")
        if self._in_a_row == _FAILURE_THRESHOLD and self.killed_after_seconds is None:
            self.killed_after_seconds = round(seconds)

    def figures(self) -> dict[str, object]:
        return {
            "probes": self.num_probes,
            "probe_failures": self.num_failures,
            "killed_by_its_probe_after_seconds": self.killed_after_seconds,
        } | ({"probe_problems": self.failures[:5]} if self.failures else {})


def count(samples: Sequence[Sample], name: str, label: str) -> Counter[str]:
    """Sum a counter by one of its labels."""
    counts: Counter[str] = Counter()
    for sample in samples:
        if sample.name == name:
            counts[sample.labels.get(label, "")] += int(sample.value)
    return counts


def quantile(samples: Sequence[Sample], name: str, share: float, **labels: str) -> float | None:
    """The quantile of a histogram, interpolated within its bucket as Prometheus does; None: it is empty."""
    buckets: defaultdict[float, float] = defaultdict(float)
    for sample in samples:
        if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
            buckets[float(sample.labels["le"])] += sample.value
    total = max(buckets.values(), default=0.0)
    below, lower = 0.0, 0.0
    for upper, cumulative in sorted(buckets.items()):
        if total and cumulative >= share * total:
            if upper == float("inf"):
                return lower
            inside = cumulative - below
            return round(lower + (upper - lower) * ((share * total - below) / inside if inside else 1.0), 4)
        below, lower = cumulative, upper
    return None


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise OSError(f"{url}: HTTP {error.code}") from None
