"""`make bench-reward`: overhead of the reward server, compared with a bare aiohttp echo server in the same run.

Three processes: this one, the server under test, and the client (aiohttp, no connection limit). The reward takes 0 ms,
so only the server is measured. Two kinds of load:
- closed: a level keeps that many requests in flight, so both servers are saturated; this shows throughput.
- open: requests arrive at random times (Poisson) at a fraction of the reward server's best rate, whether or not earlier
  ones have ended; this shows latency, counted from the time at which a request was due.
Rounds alternate between the servers, so that noise of the machine affects both. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

LEVELS = (1, 8, 64, 512, 1024, 4096, 16000)
LOADS = (0.25, 0.5, 0.75)
"""Fractions of the best closed rate of the reward server."""
NUM_ROUNDS = 3
"""Of each level and load; one of the levels that take long."""
SECONDS_PER_ROUND = 2.0
MAX_LEVEL_WITH_ROUNDS = 1024
WARM_UP_LEVEL = 64
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
        rows = [
            _compare(str(level), server, ["closed", str(level)], NUM_ROUNDS if level <= MAX_LEVEL_WITH_ROUNDS else 1)
            for level in LEVELS
        ]
        best = max(row["reward"]["requests_per_second"] for row in rows)
        loads = [_compare(f"{load:.0%}", server, ["open", str(load * best)], NUM_ROUNDS) for load in LOADS]
        # The first level runs again at the end: a growth of memory would indicate a leak.
        again = _compare(str(LEVELS[0]), server, ["closed", str(LEVELS[0])], 1)
    _show(
        rows,
        f"closed loop: reward server (0 ms function, {SLOTS} slots) against a bare aiohttp echo server",
        "in flight",
    )
    _show(loads, f"open loop: the same, at fractions of {best:,.0f} requests/s", "load")
    print(json.dumps(_summarize(rows, loads, again)))


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


def _compare(name: str, server_pid: int, load: list[str], num_rounds: int) -> dict[str, Any]:
    """Return the medians over the rounds. The ratio is that of servers in the same round."""
    rounds = [(_measure(ECHO_HOST, load), _measure(REWARD_HOST, load)) for _ in range(num_rounds)]
    ratio = statistics.median(reward["requests_per_second"] / echo["requests_per_second"] for echo, reward in rounds)
    row = {"name": name, "echo": _median([each[0] for each in rounds]), "reward": _median([each[1] for each in rounds])}
    added = {
        name: statistics.median(reward[name] - echo[name] for echo, reward in rounds) for name in ("p50_ms", "p99_ms")
    }
    num_false = sum(reward["num_false"] for _, reward in rounds)
    return row | {"ratio": ratio, "added": added, "num_false": num_false, "rss_mib": _rss_mib(server_pid)}


def _median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _rss_mib(pid: int) -> float:
    """Return the memory of the server process, which has the queue and the connections, without its workers."""
    return psutil.Process(pid).memory_info().rss / 2**20


def _measure(host: str, load: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "client", host, *load]
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


def _client(host: str, kind: str, number: str) -> None:
    print(json.dumps(asyncio.run(_load(host, kind, float(number)))))


async def _load(host: str, kind: str, number: float) -> dict[str, float]:
    """Send requests for the time of a round; return rate and latencies. `number`: in flight, or per second."""
    import aiohttp

    url = f"http://{host}:{PORT}/v1/score"
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0, family=socket.AF_INET)
    timeout = aiohttp.ClientTimeout(total=300)
    num_false = 0
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:

        async def send(request_id: str, due: float | None = None) -> float:
            start = time.perf_counter() if due is None else due
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
        level = int(number) if kind == "closed" else WARM_UP_LEVEL
        for turn in range(2):
            await asyncio.gather(*(send(f"{os.getpid()}-{number}-warm-{turn}") for number in range(level)))
        latencies: list[float] = []
        seconds = max(SECONDS_PER_ROUND, level / MIN_REQUESTS_PER_SECOND)
        end = time.perf_counter() + seconds
        if kind == "closed":
            await asyncio.gather(*(keep_requesting(number) for number in range(level)))
        else:
            latencies += await _send_at_random(send, number, end)
    latencies.sort()
    return {
        "requests_per_second": len(latencies) / seconds,
        "p50_ms": 1e3 * latencies[len(latencies) // 2],
        "p99_ms": 1e3 * latencies[len(latencies) * 99 // 100],
        "num_false": num_false,
    }


async def _send_at_random(send: Callable[[str, float], Awaitable[float]], rate: float, end: float) -> list[float]:
    """Send `rate` requests per second until `end`, each at its time; return the latencies."""
    generator, due = random.Random(0), time.perf_counter()
    tasks = []
    while (due := due + generator.expovariate(rate)) < end:
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(send(f"{os.getpid()}-{len(tasks)}", due)))
    return list(await asyncio.gather(*tasks))


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


def _show(rows: list[dict[str, Any]], title: str, what: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for name in (what, "echo req/s", "reward req/s", "ratio"):
        table.add_column(name, justify="right")
    for name in ("echo p50/p99 ms", "reward p50/p99 ms", "added p50/p99 ms", "MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        echo, reward = row["echo"], row["reward"]
        added = row["added"]
        table.add_row(
            row["name"],
            f"{echo['requests_per_second']:,.0f}",
            f"{reward['requests_per_second']:,.0f}",
            f"{row['ratio']:.2f}",
            f"{echo['p50_ms']:.1f} / {echo['p99_ms']:.1f}",
            f"{reward['p50_ms']:.1f} / {reward['p99_ms']:.1f}",
            f"{added['p50_ms']:.1f} / {added['p99_ms']:.1f}",
            f"{row['rss_mib']:.0f}",
        )
    Console(width=120).print(table)


def _summarize(rows: list[dict[str, Any]], loads: list[dict[str, Any]], again: dict[str, Any]) -> dict[str, Any]:
    return {
        "throughput_ratio": {row["name"]: round(row["ratio"], 3) for row in rows},
        "overhead_p50_ms": {row["name"]: round(row["added"]["p50_ms"], 2) for row in rows},
        "overhead_p99_ms": {row["name"]: round(row["added"]["p99_ms"], 2) for row in rows},
        "open_overhead_p50_ms": {row["name"]: round(row["added"]["p50_ms"], 2) for row in loads},
        "open_overhead_p99_ms": {row["name"]: round(row["added"]["p99_ms"], 2) for row in loads},
        "requests_per_second": {row["name"]: round(row["reward"]["requests_per_second"]) for row in rows},
        "server_mib": {row["name"]: round(row["rss_mib"]) for row in rows},
        "server_mib_at_the_end": round(again["rss_mib"]),
        "false_results": sum(row["num_false"] for row in [*rows, *loads, again]),
        "slots": SLOTS,
    }


def _raise_open_files_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
