"""Count what a reader meets on three walks through the code: `make walks`, or `python -m dev.walks [--list]`.

    prompt    from a prompt's first use to the trainer's `accumulate`, in the driver (tests/support/driver_harness.py)
    score     from the first byte of a score request to the last of its response, in the server
    reconcile from the watch event of a new job to its first status, in the operator, with an API server in memory

A walk is traced in a real run: it counts each function of RLJob's packages once, and its file. Clocks and pollers,
which run beside every walk, are left out. The ranks' half of an update is not in the first walk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("rljob_api", "rljob_inputs", "rljob_trainer", "rljob_service", "rljob_core", "rljob_operator")
_BESIDE = ("role_clock.py", "concurrency.py", "prometheus.py")
"""Files of clocks and counters, which many functions call."""
_POLLERS = ("ReplicaPool._watch",)
"""Loops that run beside a walk: whether one turns during it depends on how busy the machine is."""
_TOKEN = "walk"


class Recorder:
    """The functions of our packages that run between start and stop, and those that are on the stack at the start."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._is_done = False

    def start(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            self._codes.add(frame.f_code)
            frame = frame.f_back
        sys.setprofile(self._record)

    def stop(self) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and not _is_polled(frame):
            self._codes.add(frame.f_code)

    def list_functions(self) -> list[tuple[str, str]]:
        """Return file and name of each function, sorted."""
        found = set()
        for code in self._codes:
            path = Path(code.co_filename)
            if not path.is_relative_to(ROOT) or path.name in _BESIDE or code.co_name.startswith("<"):
                continue
            parts = path.relative_to(ROOT).parts
            if any(part in _PACKAGES for part in parts[:2]) and parts[0] != "tests":
                found.add((str(Path(*parts)), code.co_qualname))
        return sorted(found)


def _is_polled(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_qualname in _POLLERS:
            return True
        frame = frame.f_back
    return False


class _FirstUse(dict[int, Any]):
    """Prompts that call `on_use` when one is taken for the first time."""

    def __init__(self, prompts: dict[int, Any], on_use: Callable[[], None]) -> None:
        super().__init__(prompts)
        self._on_use: Callable[[], None] | None = on_use

    def __getitem__(self, key: int) -> Any:
        if (on_use := self._on_use) is not None:
            self._on_use = None
            on_use()
        return super().__getitem__(key)


async def walk_prompt(folder: Path, patch: pytest.MonkeyPatch) -> Recorder:
    """Trace one group of two samples with one reward, from its prompt to its first gradient."""
    from rljob_inputs.data.prompts import PromptSet
    from tests.support import driver_fakes, driver_harness

    recorder = Recorder()
    job = driver_harness.make_job(
        schedule={"steps": 1, "promptsPerStep": 1},
        algorithm={"groupSize": 2},
        evaluation={"atStart": False},
        checkpoint={"everySteps": 9},
    )
    accumulate = driver_fakes.FakeTrainer.accumulate

    def stop_at_gradient(*arguments: Any) -> Any:
        recorder.stop()
        return accumulate(*arguments)

    def read_prompts(num_rows: int, by_row: dict[int, Any]) -> PromptSet:
        return PromptSet(num_rows, _FirstUse(by_row, recorder.start))

    patch.setattr(driver_fakes.FakeTrainer, "accumulate", stop_at_gradient)
    patch.setattr(driver_harness, "PromptSet", read_prompts)
    network = f"{driver_harness.NETWORK}.7"
    async with driver_harness.DriverHarness(
        folder, patch, job, network=network, num_rollouts=1, num_rewards=1
    ) as harness:
        await harness.run()
    return recorder


async def walk_score(folder: Path, patch: pytest.MonkeyPatch) -> Recorder:
    """Trace one score request of a function in the server's process."""
    from rljob_api.wire.contract import UrlPath
    from rljob_service.server import lifecycle
    from rljob_service.server.served_service import load_service

    settings = {"name": "walk", "slots": 1, "function": {"inline": "def compute_score(solution_str): return 1.0"}}
    config = folder / "service.yaml"
    config.write_text(json.dumps(settings))
    recorder, host, port = Recorder(), "127.0.0.77", 18231
    service = load_service(config)
    service = service._replace(backend=service.backend._replace(python="", scratch=str(folder)))
    serving = asyncio.create_task(lifecycle.run(service, host, port, _TOKEN, 1.0))
    reader, writer = await _connect(host, port, serving)
    for number in range(2):  # the first one makes what later ones use again
        body = json.dumps({"id": f"walk/{number}", "prompt": "1", "completion": "1", "ground_truth": "1"}).encode()
        head = f"POST {UrlPath.SCORE.value} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {_TOKEN}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        if number:
            recorder.start()
        writer.write(head.encode() + body)
        status = await reader.readline()
        recorder.stop()
        assert b" 200 " in status, status
        length = 0
        while (line := await reader.readline()) != b"\r\n":
            length = int(line.split(b":")[1]) if line.startswith(b"content-length") else length
        await reader.readexactly(length)
    writer.close()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return recorder


async def walk_reconcile(folder: Path, patch: pytest.MonkeyPatch) -> Recorder:
    """Trace the first reconcile of a new job with one reward, whose children and status the API server accepts."""
    from rljob_core.defaults import DEFAULTS
    from rljob_core.kube.resources import RLJOB
    from rljob_core.loop.workqueue import WorkQueue, run
    from rljob_operator.health import Health
    from rljob_operator.kube.backend import KubernetesBackend
    from rljob_operator.kube.cache import Cache
    from rljob_operator.kube.driver import DriverClient
    from rljob_operator.metrics import OperatorMetrics
    from rljob_operator.operator import build_reconcile
    from rljob_operator.watch.informer import Informer

    recorder, reconciled = Recorder(), asyncio.Event()

    class Api:
        """Accepts each object, and has no Secret and no ConfigMap that lacks a reference."""

        version = 1

        async def request(self, method: str, path: str, *, body: Any = None, **_: Any) -> Any:
            if path.endswith("/status"):
                recorder.stop()
                reconciled.set()
            self.version += 1
            written = {"uid": f"uid-{self.version}", "resourceVersion": str(self.version)}
            return {**(body or {}), "metadata": {**(body or {}).get("metadata", {}), **written}}

    api: Any = Api()
    cache = Cache()
    informer = Informer(api, cache, (), 600.0)
    health = Health(WorkQueue(1.0), OperatorMetrics(set()))
    backend = KubernetesBackend(api, cache, DriverClient(asyncio.get_running_loop().time, informer.requeue))
    reconcile_key = build_reconcile(backend, health, DEFAULTS, asyncio.get_running_loop().time)
    function = {"inline": "def score(sample):\n    return 1.0\n"}
    spec = {
        "model": {"source": "/models/tiny"},
        "data": {"train": {"source": "/data/train.jsonl"}},
        "rewards": [{"name": "correct", "function": function}],
    }
    metadata = {"name": "walk", "namespace": "ns", "uid": "uid", "resourceVersion": "1", "generation": 1}
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": metadata, "spec": spec}

    async def watch() -> AsyncGenerator[Any, None]:
        recorder.start()
        informer._on_event(RLJOB, {"type": "ADDED", "object": job})
        while True:
            yield await informer._changed.get()

    running = asyncio.create_task(run(watch, reconcile_key, 1, queue=health.queue))
    async with asyncio.timeout(60):
        await reconciled.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return recorder


async def _connect(
    host: str, port: int, serving: asyncio.Task[None]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(60):
        while True:
            if serving.done():
                serving.result()
            try:
                return await asyncio.open_connection(host, port)
            except OSError:
                await asyncio.sleep(0.05)


_WALKS: dict[str, Callable[[Path, pytest.MonkeyPatch], Coroutine[Any, Any, Recorder]]] = {
    "prompt": walk_prompt,
    "score": walk_score,
    "reconcile": walk_reconcile,
}


def trace(name: str) -> list[tuple[str, str]]:
    """Return file and name of each function on a walk."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        return asyncio.run(_WALKS[name](Path(folder), patch)).list_functions()


def count_walks() -> dict[str, dict[str, int]]:
    """Return the functions and files of each walk."""
    return {name: _count(trace(name)) for name in _WALKS}


def _count(functions: list[tuple[str, str]]) -> dict[str, int]:
    return {"functions": len(functions), "files": len({file for file, _ in functions})}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dev.walks", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print each function, too")
    is_listed, counts = parser.parse_args().list, {}
    for name in _WALKS:
        functions = trace(name)
        counts[name] = _count(functions)
        for file, number in Counter(file for file, _ in functions).items() if is_listed else ():
            print(f"{name}  {number:3}  {file}: {', '.join(each for path, each in functions if path == file)}")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
