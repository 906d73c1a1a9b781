"""`make bench-reward`: overhead of the reward server, compared with a bare aiohttp echo server in the same run.

Three processes: this one, the server under test, and the client (aiohttp, no connection limit). A level keeps that many
requests in flight: each response is followed by the next request at once, so both servers are saturated. The reward
takes 0 ms, so only the server is measured. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

LEVELS = (1, 8, 64, 512, 1024, 4096, 16000)
SECONDS_PER_LEVEL = 3.0
MIN_REQUESTS_PER_SECOND = 800
"""Rate on a busy machine: a level lasts long enough for one response per in-flight request."""
ECHO_HOST, REWARD_HOST, PORT = "127.10.255.1", "127.10.255.2", 18080
TOKEN = "bench"
SLOTS = 16
REWARD = f"""\
name: bench
slots: {SLOTS}
queueLength: 32768
function:
  inline: |
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0
"""


def main() -> None:
    _raise_open_files_limit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="*", help=argparse.SUPPRESS)  # of the processes that this one starts
    if program := parser.parse_args().program:
        {"echo": _echo, "client": _client}[program[0]](*program[1:])
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        config = Path(folder, "reward.yaml")
        config.write_text(REWARD)
        reward = ["-m", "rljob_reward", "--config", str(config), "--host", REWARD_HOST, "--port", str(PORT)]
        servers.enter_context(_server([__file__, "echo"], ECHO_HOST))
        server = servers.enter_context(_server(reward, REWARD_HOST))
        # Levels alternate between the servers, so that noise of the machine affects both. The first level runs again at
        # the end: a growth of memory would indicate a leak.
        rows = [_compare(level, server) for level in LEVELS]
        again = _compare(LEVELS[0], server)
    _show(rows)
    print(json.dumps(_summarize(rows, again)))


@contextlib.contextmanager
def _server(arguments: list[str], host: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, *arguments], env={**os.environ, "RLJOB_TOKEN": TOKEN})
    try:
        _wait_ready(process, f"http://{host}:{PORT}/rljob/ready")
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"{url}: the server ended with exit code {process.returncode}")
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=1):
            return
        time.sleep(0.05)
    sys.exit(f"{url}: not ready after 30 s")


def _compare(level: int, server_pid: int) -> dict[str, Any]:
    row = {"level": level, "echo": _measure(ECHO_HOST, level), "reward": _measure(REWARD_HOST, level)}
    return row | {"rss_mib": _rss_mib(server_pid)}


def _rss_mib(pid: int) -> float:
    """Return the memory of the server process, which has the queue and the connections, without its workers."""
    return psutil.Process(pid).memory_info().rss / 2**20


def _measure(host: str, level: int) -> dict[str, float]:
    command = [sys.executable, __file__, "client", host, str(level)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)  # type: ignore[no-any-return]


def _echo() -> None:
    from aiohttp import web

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read(), content_type="application/json")

    async def ready(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/score", echo), web.get("/rljob/ready", ready)])
    web.run_app(app, host=ECHO_HOST, port=PORT, access_log=None, print=None, backlog=8192)


def _client(host: str, level: str) -> None:
    print(json.dumps(asyncio.run(_load(host, int(level)))))


async def _load(host: str, level: int) -> dict[str, float]:
    """Keep `level` requests in flight; return rate and latencies of the requests that ended in time."""
    import aiohttp

    url = f"http://{host}:{PORT}/v1/score"
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0, family=socket.AF_INET)
    timeout = aiohttp.ClientTimeout(total=300)
    num_false = 0
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:

        async def send(request_id: str) -> float:
            start = time.perf_counter()
            async with session.post(url, data=_body(request_id)) as response:
                answer = await response.read()
                if response.status != 200:
                    raise SystemExit(f"{url}: HTTP {response.status}")
            # A timeout or a zero would be false: the function returns 1 at once.
            if host == REWARD_HOST and b'"valid":true,"score":1.0' not in answer:
                nonlocal num_false
                num_false += 1
            return time.perf_counter() - start

        async def keep_requesting(number: int) -> None:
            count = 0
            while time.perf_counter() < end:
                count += 1
                latency = await send(f"{os.getpid()}-{number}-{count}")
                if time.perf_counter() < end:
                    latencies.append(latency)

        # Two rounds of warm-up open the connections and start the workers.
        for turn in range(2):
            await asyncio.gather(*(send(f"{os.getpid()}-{number}-warm-{turn}") for number in range(level)))
        latencies: list[float] = []
        seconds = max(SECONDS_PER_LEVEL, level / MIN_REQUESTS_PER_SECOND)
        end = time.perf_counter() + seconds
        await asyncio.gather(*(keep_requesting(number) for number in range(level)))
    latencies.sort()
    return {
        "requests_per_second": len(latencies) / seconds,
        "p50_ms": 1e3 * latencies[len(latencies) // 2],
        "p99_ms": 1e3 * latencies[len(latencies) * 99 // 100],
        "num_false": num_false,
    }


def _body(request_id: str) -> bytes:
    """Build a realistic request: a chat prompt of a few sentences and a completion of 200 words."""
    request = {
        "id": request_id,
        "lane": "train",
        "prompt": [{"role": "user", "content": "What is 17 + 25? Think first, then answer with #### N. " * 4}],
        "completion": "First add the tens and then the units. " * 25 + "#### 42",
        "ground_truth": "42",
        "data_source": "bench",
        "extra_info": {"index": 1, "split": "train", "truncated": False, "num_tokens": 210},
    }
    return json.dumps(request).encode()


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"reward server (0 ms function, {SLOTS} slots) against a bare aiohttp echo server")
    for name in ("in flight", "echo req/s", "reward req/s", "ratio"):
        table.add_column(name, justify="right")
    for name in ("echo p50/p99 ms", "reward p50/p99 ms", "added p50/p99 ms", "MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        echo, reward = row["echo"], row["reward"]
        added = _added(row)
        table.add_row(
            str(row["level"]),
            f"{echo['requests_per_second']:,.0f}",
            f"{reward['requests_per_second']:,.0f}",
            f"{_ratio(row):.2f}",
            f"{echo['p50_ms']:.1f} / {echo['p99_ms']:.1f}",
            f"{reward['p50_ms']:.1f} / {reward['p99_ms']:.1f}",
            f"{added['p50_ms']:.1f} / {added['p99_ms']:.1f}",
            f"{row['rss_mib']:.0f}",
        )
    Console(width=120).print(table)


def _ratio(row: dict[str, Any]) -> float:
    return float(row["reward"]["requests_per_second"] / row["echo"]["requests_per_second"])


def _added(row: dict[str, Any]) -> dict[str, float]:
    return {name: row["reward"][name] - row["echo"][name] for name in ("p50_ms", "p99_ms")}


def _summarize(rows: list[dict[str, Any]], again: dict[str, Any]) -> dict[str, Any]:
    return {
        "throughput_ratio": {str(row["level"]): round(_ratio(row), 3) for row in rows},
        "overhead_p50_ms": {str(row["level"]): round(_added(row)["p50_ms"], 2) for row in rows},
        "overhead_p99_ms": {str(row["level"]): round(_added(row)["p99_ms"], 2) for row in rows},
        "requests_per_second": {str(row["level"]): round(row["reward"]["requests_per_second"]) for row in rows},
        "server_mib": {str(row["level"]): round(row["rss_mib"]) for row in rows},
        "server_mib_at_the_end": round(again["rss_mib"]),
        "false_results": sum(row["reward"]["num_false"] for row in [*rows, again]),
        "slots": SLOTS,
    }


def _raise_open_files_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
