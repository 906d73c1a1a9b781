"""`make bench-reward`: overhead of the reward server, compared with two other servers in the same run.

The echo is a bare aiohttp server: the limit. The pool is what one writes by hand, aiohttp and a ProcessPoolExecutor
with as many processes as the reward has slots, as in verl's `prime` reward manager: no isolation, timeouts, limits or
metrics. Each server has its process, and so has the client (aiohttp, no connection limit). The reward takes 0 ms, so
only the servers are measured. Two kinds of load:
- closed: a level keeps that many requests in flight, so both servers are saturated; this shows throughput.
- open: requests arrive at random times (Poisson) at a fraction of the reward server's best rate, whether or not earlier
  ones have ended; this shows latency, counted from the time at which a request was due.
Rounds alternate between the servers, so that noise of the machine affects both. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
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
NUM_ROUNDS = 5
"""Rounds of each level and load; one of the levels that take long."""
SECONDS_PER_ROUND = 2.0
MAX_LEVEL_WITH_ROUNDS = 4096
WARM_UP_LEVEL = 64
MIN_REQUESTS_PER_SECOND = 800
"""Rate on a busy machine: a level lasts long enough for one response per in-flight request."""
HOSTS = {"echo": "127.10.255.1", "reward": "127.10.255.2", "pool": "127.10.255.3"}
PORT = 18080
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
        {"echo": _echo, "pool": _pool, "client": _client}[program[0]](*program[1:])
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        config = Path(folder, "service.yaml")
        config.write_text(REWARD)
        reward = ["-m", "rljob_service", "--config", str(config), "--host", HOSTS["reward"], "--port", str(PORT)]
        for name in ("echo", "pool"):
            servers.enter_context(_server([__file__, name], HOSTS[name]))
        server = servers.enter_context(_server(reward, HOSTS["reward"]))
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
        f"closed loop: a 0 ms function in {SLOTS} slots, a bare aiohttp echo, a process pool",
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
    """Return the medians over the rounds. `ratio` and `added` compare servers of the same round with the echo."""
    rounds = [{server: _measure(host, load) for server, host in HOSTS.items()} for _ in range(num_rounds)]
    row: dict[str, Any] = {"name": name, "num_false": sum(each["reward"]["num_false"] for each in rounds)}
    for server in HOSTS:
        row[server] = _median([each[server] for each in rounds])
        row[server]["ratio"] = statistics.median(_rate(each[server]) / _rate(each["echo"]) for each in rounds)
        row[server]["added"] = {
            name: statistics.median(each[server][name] - each["echo"][name] for each in rounds)
            for name in ("p50_ms", "p99_ms")
        }
    return row | {"rss_mib": _rss_mib(server_pid)}


def _rate(measured: dict[str, float]) -> float:
    return measured["requests_per_second"]


def _median(rounds: list[dict[str, float]]) -> dict[str, Any]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _rss_mib(pid: int) -> float:
    """Return the memory of the server process, which has the queue and the connections, without its workers."""
    return psutil.Process(pid).memory_info().rss / 2**20


def _measure(host: str, load: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "client", host, *load]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)  # type: ignore[no-any-return]


def _echo() -> None:
    async def echo(body: bytes) -> bytes:
        return body

    _serve("echo", echo)


def _pool() -> None:
    with concurrent.futures.ProcessPoolExecutor(SLOTS) as pool:

        async def score(body: bytes) -> bytes:
            request = json.loads(body)
            arguments = (request[name] for name in ("data_source", "completion", "ground_truth", "extra_info"))
            score = await asyncio.get_running_loop().run_in_executor(pool, compute_score, *arguments)
            return json.dumps({"id": request["id"], "score": score}).encode()

        _serve("pool", score)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return 1.0


def _serve(name: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
    from aiohttp import web

    async def score(request: web.Request) -> web.Response:
        return web.Response(body=await answer(await request.read()), content_type="application/json")

    async def ready(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/score", score), web.get("/rljob/ready", ready)])
    web.run_app(app, host=HOSTS[name], port=PORT, access_log=None, print=None, backlog=8192)


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
            if host == HOSTS["reward"] and b'"valid":true,"score":1.0' not in answer:
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
    names = [what, *(f"{server} req/s" for server in HOSTS), *(f"{server} / echo" for server in ("reward", "pool"))]
    names += [*(f"{server} adds p50, p99 ms" for server in ("reward", "pool")), "MiB"]
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            *(f"{_rate(row[server]):,.0f}" for server in HOSTS),
            *(f"{row[server]['ratio']:.2f}" for server in ("reward", "pool")),
            *(f"{row[s]['added']['p50_ms']:.1f}, {row[s]['added']['p99_ms']:.1f}" for s in ("reward", "pool")),
            f"{row['rss_mib']:.0f}",
        )
    Console(width=120).print(table)


def _summarize(rows: list[dict[str, Any]], loads: list[dict[str, Any]], again: dict[str, Any]) -> dict[str, Any]:
    def added(rows: list[dict[str, Any]], quantile: str, server: str = "reward") -> dict[str, float]:
        return {row["name"]: round(row[server]["added"][quantile], 2) for row in rows}

    return {
        "throughput_ratio": {row["name"]: round(row["reward"]["ratio"], 3) for row in rows},
        "pool_throughput_ratio": {row["name"]: round(row["pool"]["ratio"], 3) for row in rows},
        "overhead_p50_ms": added(rows, "p50_ms"),
        "overhead_p99_ms": added(rows, "p99_ms"),
        "open_overhead_p50_ms": added(loads, "p50_ms"),
        "open_overhead_p99_ms": added(loads, "p99_ms"),
        "pool_open_overhead_p99_ms": added(loads, "p99_ms", "pool"),
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
