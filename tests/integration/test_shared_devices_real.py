"""The trainer Pod's program with a real engine, in turns: it sleeps, wakes with a new version, and is killed.

One Pod for all, since the start of an engine takes most of the time. There is no Ray: no head accepts its nodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rljob_api.wire import contract
from rljob_api.wire.contract import UrlPath
from rljob_api.wire.weights import EnginesReport, WeightManifest
from rljob_trainer.policy.policy import Published
from rljob_trainer.ranks.actor import digest_published
from rljob_trainer.weights.hand_over import HandOver
from rljob_trainer.weights.store import WeightStore
from tests.integration import test_rollout_real as real
from tests.support.tiny_qwen3 import TINY_QWEN3
from tests.support.waiting import wait_for
from tests.support.weight_files import publish

pytestmark = pytest.mark.real

CACHE_BYTES = 512 << 20
WEIGHTS: dict[str, Any] = {**TINY_QWEN3, "vocab_size": 120_000, "hidden_size": 256, "num_hidden_layers": 2}
"""Large enough to be seen in the memory of a process: 120 MB."""
ENGINES = f"http://{real.ROLLOUT_IP}:{contract.PORT_ENGINES}{UrlPath.ENGINES}"


class Pod:
    def __init__(self, folder: Path) -> None:
        self.head, self.store = real.Head(), WeightStore(real.TRAINER_IP, real.TOKEN)
        self.references = [build_model(seed) for seed in range(2)]
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self.references[0].parameters())
        real._save_model(self.references[0], folder / "model")
        spec: dict[str, Any] = real.JOB["spec"] | {"schedule": {"type": "synchronous"}}
        spec["rollout"] = spec["rollout"] | {"placement": "trainer", "kvCacheMemory": str(CACHE_BYTES)}
        (folder / "job.yaml").write_text(json.dumps({**real.JOB, "spec": spec}))
        (folder / "hosts").write_text(f"{real.HEAD_IP} head\n")
        variables = {
            contract.ENV_JOB_FILE: str(folder / "job.yaml"),
            contract.ENV_HOSTS_FILE: str(folder / "hosts"),
            contract.ENV_HEAD: "head",
            contract.ENV_POD_IP: real.ROLLOUT_IP,
            contract.ENV_TOKEN: real.TOKEN,
            contract.ENV_MODEL: str(folder / "model"),
            contract.ENV_TERMINATION_LOG: str(folder / "termination"),
            "HF_HUB_OFFLINE": "1",
        }
        self.log = folder / "log"
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "rljob_trainer.worker"]
            self.process = subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=log)

    def publish(self, version: int, reference: int) -> WeightManifest:
        return publish(self.store, self.references[reference].state_dict(), "g", version)

    def engine(self) -> list[psutil.Process]:
        """Return the engine's processes, vLLM's server first."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        self.process.terminate()
        try:
            assert self.process.wait(60) == contract.ExitCode.SUCCEEDED, self.log.read_text()[-4000:]
        finally:
            self.process.kill()
            self.store.close()
            self.head.close()


def build_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**WEIGHTS, tie_word_embeddings=True)).float().eval()


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the reference must not compete with the engine for every core
    pod = Pod(tmp_path_factory.mktemp("pod"))
    try:
        yield pod
    finally:
        torch.set_num_threads(num_threads)
        pod.close()


def anonymous_bytes(processes: list[psutil.Process]) -> int:
    """Return the largest private memory of a process."""
    sizes = [0]
    for process in processes:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue
        sizes += [int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:")]
    return max(sizes)


async def turn(query: str) -> EnginesReport:
    timeout = aiohttp.ClientTimeout(total=real.START_SECONDS)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{ENGINES}?turn={query}", headers=real.AUTHORIZED) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
        return EnginesReport.model_validate_json(text)


async def serve(pod: Pod, manifest: WeightManifest, reference: int) -> None:
    """Wait until the engine serves the version, and compare its tokens with the reference model's."""

    async def serves() -> bool:
        return await real._is_ready()

    await real._wait_for(serves, pod)  # type: ignore[arg-type]
    served = await real._weights(manifest)
    assert served["checksum"] == manifest.checksum
    print(f"\n{manifest.key}: load {served['load_seconds']:.2f} s")
    found = await real._generate(manifest.key, temperature=0, max_tokens=8)
    assert found.token_ids == real._greedy(pod.references[reference], 8)


async def refused() -> str:
    status, text = await real._request("POST", "/v1/completions", real.AUTHORIZED, json={})
    assert status == 503
    return text


async def test_engine_sleeps_and_wakes_with_the_next_version(pod: Pod) -> None:
    peak = [0]

    def is_up() -> bool:
        peak[0] = max(peak[0], anonymous_bytes(pod.engine()))
        assert pod.process.poll() is None, pod.log.read_text()[-4000:]
        return "waiting for the head" in pod.log.read_text()

    started = time.monotonic()
    await asyncio.to_thread(wait_for, is_up, "a warm engine that sleeps")
    print(f"\nasleep after {time.monotonic() - started:.1f} s")
    asleep = await turn("trainer")
    print(f"start {peak[0] / 1e6:.0f} MB, asleep {asleep}")
    assert asleep.num_running == 1
    assert peak[0] - asleep.num_bytes > CACHE_BYTES + pod.weight_bytes
    assert "asleep" in await refused()

    first = pod.publish(0, reference=0)
    pod.head.announce(first)
    awake = await turn("rollouts&want=g:0")
    print(f"awake {awake}")
    await serve(pod, first, reference=0)
    loaded = await turn("rollouts&want=g:0")
    print(f"loaded {loaded}")

    asleep = await turn("trainer")
    print(f"asleep {asleep}, in truth {anonymous_bytes(pod.engine()) / 1e6:.0f} MB")
    assert anonymous_bytes(pod.engine()) - asleep.num_bytes < 20e6
    assert "asleep" in await refused()
    second = pod.publish(1, reference=1)
    awake = await turn("rollouts&want=g:1")
    assert "no weights" in await refused(), "it must not load the old version that is still announced"
    pod.head.announce(second)
    await serve(pod, second, reference=1)
    assert pod.log.read_text().count("serving weights g:0") == 1


async def test_engine_that_is_killed_comes_back_in_the_rollouts_turn(pod: Pod) -> None:
    await turn("trainer")
    processes = pod.engine()
    processes[0].send_signal(signal.SIGKILL)
    await wait_until(lambda: not any(process.is_running() for process in processes))
    assert (await turn("trainer")).num_running == 0
    assert not pod.engine(), "nothing starts in the trainer's turn"

    manifest = pod.publish(2, reference=0)
    pod.head.announce(manifest)
    started = time.monotonic()
    await turn("rollouts&want=g:2")
    await serve(pod, manifest, reference=0)
    print(f"served {time.monotonic() - started:.1f} s after the turn")


async def test_engine_gets_weights_without_a_file_and_comes_back_if_killed_meanwhile(pod: Pod) -> None:
    await turn("trainer")
    folder = Path(pod.engine()[0].environ()[contract.ENV_HAND_OVER])
    rank = HandOver(folder, real.TOKEN, torch.device("cpu"))
    tensors = dict(pod.references[1].named_parameters())
    manifest = digest_published(Published.of(tensors), "g", 3, "element")
    pod.head.announce(manifest)
    try:
        rank.allow(manifest.key)
        await turn("rollouts&want=g:3")
        await wait_until(lambda: rank.num_waiting == 1)
        rank.allow("")
        await turn("trainer")  # as long as it waits, it cannot sleep

        rank.allow(manifest.key)
        await turn("rollouts&want=g:3")
        assert await asyncio.to_thread(rank.give, tensors.items(), real.START_SECONDS, lambda: None) == 1
        await serve(pod, manifest, reference=1)

        await turn("trainer")
        await turn("rollouts&want=g:3")
        processes = pod.engine()
        await wait_until(lambda: rank.num_waiting == 1)
        assert await asyncio.to_thread(rank.give, killing(tensors, processes), 0.0, lambda: None) == 0
        assert await asyncio.to_thread(rank.give, tensors.items(), real.START_SECONDS, lambda: None) == 1
        await serve(pod, manifest, reference=1)
        assert not any(process.is_running() for process in processes)
        report = await turn("rollouts&want=g:3")
        assert (report.num_running, report.num_restarts) == (1, 2)
        assert pod.process.poll() is None
    finally:
        rank.close()


def killing(tensors: dict[str, torch.Tensor], processes: list[psutil.Process]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, and kill vLLM's engine in between, not its server."""
    for number, item in enumerate(tensors.items()):
        if number == len(tensors) // 2:
            max(processes, key=lambda each: anonymous_bytes([each])).send_signal(signal.SIGKILL)
        yield item


async def wait_until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_for, condition, "the condition")
