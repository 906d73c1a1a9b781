"""The trainer group on a real Ray head and two real trainer Pods, each on its own loopback address.

All tests share the Pods: each leaves them without ranks.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import numpy as np
import psutil
import pytest
import pytest_asyncio
import yaml

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_sections import HangDetection
from rljob_inputs.models.defaults import resolve_job
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.episodes.types import NOT_SAMPLED, TrainRow, UpdateMetrics, UpdateVersions
from rljob_trainer.liveness.judge import Pace
from rljob_trainer.ranks.ray_head import RayHead
from rljob_trainer.ranks.ray_node import ray_environment
from rljob_trainer.run_folder import server as server_module
from rljob_trainer.run_folder.client import RunFolder
from rljob_trainer.run_folder.file_facts import Checkpoint, DamagedCheckpointError
from rljob_trainer.run_folder.server import RunFileServer
from rljob_trainer.weights.checksum import hash_file
from tests.support.loopback import next_address
from tests.support.waiting import DEADLINE_SECONDS
from tests.support.weight_hashes import hash_chunks

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

HEAD, PODS = next_address(), (next_address(), next_address())
TOKEN = os.environ["RAY_AUTH_TOKEN"]  # conftest.py
PROMPT = [5, 6, 7]


def build_job(model: Path) -> RLJob:
    job = RLJob.model_validate(
        {
            "metadata": {"name": "group"},
            "spec": {
                "model": {"source": str(model)},
                "data": {"train": {"source": "/none.jsonl"}},
                "rewards": [{"name": "r", "function": {"inline": "def compute_score(): ..."}}],
                "algorithm": {
                    "groupSize": 4,
                    "kl": {"coefficient": 0.01, "estimator": "k1"},
                    "optimizer": {"learningRate": 1e-3},
                },
                "schedule": {"promptsPerStep": 2, "steps": 4},
                "trainer": {"replicas": 2, "dtype": "float32"},
                "checkpoint": {"asynchronous": "always"},
            },
        }
    )
    return resolve_job(job, None)


def build_rows(seed: int) -> list[TrainRow]:
    completions = [[(seed + 3 * i + k) % 90 + 3 for k in range(4 + i % 3)] for i in range(8)]
    return [build_row(completion, advantage=(-1.0) ** i) for i, completion in enumerate(completions)]


def build_row(completion: list[int], advantage: float) -> TrainRow:
    sampled = np.array([0] * len(PROMPT) + [1] * len(completion), np.bool_)
    return TrainRow(
        token_ids=np.array(PROMPT + completion),
        loss_mask=sampled,
        rollout_logprobs=np.where(sampled, -4.0, 0.0).astype(np.float32),
        advantages=np.where(sampled, advantage, 0.0).astype(np.float32),
        versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
    )


async def start_again(job: RLJob, model: Path, run: RunFolder) -> Any:
    """Start a group on Pods that must join first."""
    import ray

    from rljob_trainer.ranks.group import TrainerGroup

    reports: list[str] = []
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await TrainerGroup.start(
                job, model=str(model), run=run, generation="g2", checkpoint=None, report=reports.append
            )
    except TimeoutError:
        raise AssertionError(f"it has reported {reports}; the nodes: {ray.nodes()}") from None


async def update(group: Any, rows: list[TrainRow]) -> UpdateMetrics:
    """Train on the rows in two calls: of 7, and of 1, with which one of the ranks has nothing to do."""
    for part in (rows[:7], rows[7:]):
        await group.accumulate(part, UpdateVersions(0, 0, 1))
    return await group.apply(sum(int(row.loss_mask.sum()) for row in rows))


@dataclass
class Pods:
    head: RayHead
    env: dict[str, str]
    workers: list[subprocess.Popen]

    def start(self, index: int) -> None:
        """Start the trainer Pod of this index, or replace it."""
        command, env = [sys.executable, "-m", "rljob_trainer.worker"], {**self.env, "RLJOB_POD_IP": PODS[index]}
        self.workers[index : index + 1] = [subprocess.Popen(command, env=env)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pods(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pods]:
    """A Ray head and two trainer Pods that join it."""
    folder = tmp_path_factory.mktemp("pods")
    (folder / "job.yaml").write_text(yaml.safe_dump(build_job(model).to_manifest()))
    (folder / "hosts").write_text(f"{HEAD} head\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLJOB_TOKEN", TOKEN)
        patch.setenv("RLJOB_POD_IP", HEAD)
        for name, value in ray_environment().items():
            patch.setenv(name, value)
        shared = {
            "RLJOB_HEAD": "head",
            "RLJOB_HOSTS_FILE": str(folder / "hosts"),
            "RLJOB_JOB_FILE": str(folder / "job.yaml"),
            "RLJOB_MODEL": str(model),
        }
        started = Pods(RayHead(HEAD), {**os.environ, **shared}, [])
        for index in range(len(PODS)):
            started.start(index)
        try:
            await started.head.start()
            yield started
        finally:
            import ray

            ray.shutdown()
            for worker in started.workers:
                worker.terminate()
            codes = [await asyncio.to_thread(worker.wait, DEADLINE_SECONDS) for worker in started.workers]
            await started.head.close()
    assert codes == [0, 0], "SIGTERM must end a Pod with success"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run's folder that only the head sees."""
    server = RunFileServer(tmp_path, HEAD, TOKEN)
    yield replace(server.folder, path=Path("/not/in/this/pod"))
    server.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds back what ranks send to the head, until it is set."""
    gate, receive = threading.Event(), server_module._receive

    async def wait_and_receive(*arguments: Any) -> tuple[int, int]:
        await asyncio.to_thread(gate.wait, DEADLINE_SECONDS)
        return await receive(*arguments)

    monkeypatch.setattr(server_module, "_receive", wait_and_receive)
    yield gate
    gate.set()


async def wait_until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, "the condition never became true"
        await asyncio.sleep(0.1)
    return result


async def wait_for_end(process_ids: list[int]) -> None:
    await wait_until(lambda: not any(map(psutil.pid_exists, process_ids)))


async def test_trainer_group_resumes_identically_when_a_rank_dies(
    pods: Pods, model: Path, run: RunFolder, tmp_path: Path, gate: threading.Event
) -> None:
    """The checkpoint is written next to an update. No Pod sees the folder, as on a cluster without a claim."""
    from rljob_trainer.ranks.group import TrainerGroup

    job, reported = build_job(model), []
    group = await TrainerGroup.start(
        job, model=str(model), run=run, generation="g1", checkpoint=None, report=reported.append
    )
    assert any("trainer Pods to join Ray" in text for text in reported), reported

    rows = build_rows(0)
    before = await group.inspect(rows)
    metrics = await update(group, rows)
    assert metrics.num_tokens == sum(int(row.loss_mask.sum()) for row in rows)
    assert (metrics.num_micro_batches, metrics.trained_share, metrics.learning_rate) == (2, 1.0, 1e-3)
    assert metrics.grad_norm > 0
    for row, facts, again in zip(rows, before, await group.inspect(rows), strict=True):
        assert ((facts.reference_logprobs < 0) == row.loss_mask).all()
        assert (facts.reference_logprobs == again.reference_logprobs).all(), "updates do not change the reference"

    manifest = await group.publish(1)
    assert manifest.key == "g1:1"
    async with aiohttp.ClientSession() as session:
        async with session.get(manifest.url) as rejected:
            assert rejected.status == 401, "weights need the job's token"
        async with session.get(manifest.url, headers={"Authorization": f"Bearer {TOKEN}"}) as response:
            body = await response.read()
    assert hash_file(hash_chunks(memoryview(body))) == manifest.file_hash
    assert len(body) == manifest.num_bytes

    checkpoint = run.path / "checkpoints" / "step-000001"
    await group.save(checkpoint)
    await update(group, build_rows(1))
    undisturbed = await group.publish(2)
    assert not (tmp_path / "checkpoints" / "step-000001" / "trainer" / ".metadata").exists()
    gate.set()
    files = await group.saved()
    saved = {path.name for path in (tmp_path / "checkpoints" / "step-000001" / "trainer").iterdir()}
    assert saved == {".metadata", "__0_0.distcp", "__1_0.distcp"}, "each Pod has sent its part to the head"
    assert files.keys() == {f"trainer/{name}" for name in saved}
    complete = Checkpoint(checkpoint, files)

    updating = asyncio.create_task(update(group, build_rows(2)))
    os.kill(group.process_ids[1], signal.SIGKILL)
    with pytest.raises(TrainerGroupDiedError) as died:
        await asyncio.wait_for(updating, DEADLINE_SECONDS)
    assert not died.value.lost_node, "its Pod still runs, so the rank has failed"
    with pytest.raises(TrainerGroupDiedError):
        await update(group, build_rows(2))

    reserve = mock.AsyncMock()
    resumed = await TrainerGroup.start(
        job, model=str(model), run=run, generation="g2", checkpoint=complete, report=reported.append, reserve=reserve
    )
    reserve.assert_awaited_once()
    assert min(await resumed.free()) > 0
    await resumed.restore()
    await update(resumed, build_rows(1))
    assert min(await resumed.free()) > 0, "as for rollouts on the same devices, which change nothing"
    await resumed.restore()
    again = await resumed.publish(2)
    assert (again.file_hash, again.checksum) == (undisturbed.file_hash, undisturbed.checksum), "resume must be exact"

    watching = asyncio.create_task(resumed.watch())
    await update(resumed, build_rows(2))
    assert not watching.done(), "an update is not a failure"
    os.kill(resumed.process_ids[0], signal.SIGKILL)
    with pytest.raises(TrainerGroupDiedError):
        await asyncio.wait_for(watching, DEADLINE_SECONDS)
    await resumed.close()

    with (tmp_path / "checkpoints" / "step-000001" / "trainer" / "__1_0.distcp").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff\xfe")
    with pytest.raises(DamagedCheckpointError, match=r"step-000001/trainer/__1_0\.distcp on the head has the hash"):
        await TrainerGroup.start(
            job, model=str(model), run=run, generation="g3", checkpoint=complete, report=reported.append
        )
    await wait_for_end(resumed.process_ids)


def evict(worker: subprocess.Popen) -> None:
    worker.terminate()


def kill_container(worker: subprocess.Popen) -> None:
    """As the kernel does when the container is out of memory."""
    for process in [*psutil.Process(worker.pid).children(recursive=True), worker]:
        with suppress(psutil.NoSuchProcess):  # a child of one that was killed before may have ended on its own
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("end", [evict, kill_container])
async def test_trainer_group_that_lost_a_pod_says_so(
    pods: Pods, model: Path, run: RunFolder, end: Callable[[subprocess.Popen], None]
) -> None:
    """The operator sees what happened to the Pod, and charges it or not. A rank does not count in addition."""
    from rljob_trainer.ranks.group import TrainerGroup

    group = await TrainerGroup.start(
        build_job(model), model=str(model), run=run, generation="g1", checkpoint=None, report=lambda text: None
    )
    watching = asyncio.create_task(group.watch())
    updating = asyncio.create_task(update(group, build_rows(0)))
    end(pods.workers[1])
    ended, _ = await asyncio.wait((watching, updating), timeout=DEADLINE_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
    failures = [task.exception() for task in ended if task.exception()]
    for task in (watching, updating):
        task.cancel()
    await asyncio.to_thread(pods.workers[1].wait, DEADLINE_SECONDS)
    pods.start(1)
    assert [getattr(failure, "lost_node", None) for failure in failures[:1]] == [True], failures


@pytest.mark.slow
async def test_ranks_end_a_cancelled_call_and_can_be_saved(
    pods: Pods, model: Path, run: RunFolder, gate: threading.Event
) -> None:
    """As when the head is drained while gradients are computed, and a checkpoint is written."""
    from rljob_trainer.ranks.group import TrainerGroup

    job, folders = build_job(model), [run.path / "checkpoints" / f"step-00000{step}" for step in (1, 2)]
    group = await TrainerGroup.start(job, model=str(model), run=run, generation="g1", checkpoint=None, report=print)
    await update(group, build_rows(0))
    served = await group.publish(1)
    await group.save(folders[0])
    saving = asyncio.create_task(group.saved())
    accumulating = asyncio.create_task(group.accumulate(build_rows(1), UpdateVersions(1, 1, 1)))
    await asyncio.sleep(0.1)
    accumulating.cancel()
    gate.set()
    assert len(await asyncio.wait_for(saving, DEADLINE_SECONDS)) == 3
    with pytest.raises(asyncio.CancelledError):
        await accumulating
    await group.save(folders[1])
    files = await group.saved()
    await group.close()
    await wait_for_end(group.process_ids)

    resumed = await TrainerGroup.start(
        job, model=str(model), run=run, generation="g2", checkpoint=Checkpoint(folders[1], files), report=print
    )
    assert (await resumed.publish(1)).file_hash == served.file_hash, "the gradients are not in it"
    await resumed.close()


@pytest.mark.slow
async def test_trainer_pods_join_a_restarted_head(pods: Pods, model: Path, run: RunFolder) -> None:
    import ray

    from rljob_trainer.ranks.group import TrainerGroup

    job = build_job(model)
    group = await TrainerGroup.start(job, model=str(model), run=run, generation="g1", checkpoint=None, report=print)
    ray.shutdown()
    await pods.head.close()
    pods.head = RayHead(HEAD)
    await pods.head.start()
    restarted = await start_again(job, model, run)
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert (await update(restarted, build_rows(0))).num_tokens > 0
    await wait_for_end(group.process_ids)
    await restarted.close()


async def test_a_stopped_rank_is_named_killed_and_replaced(run: RunFolder, model: Path, pods: Pods) -> None:
    """Its peers wait for it in a collective. The kernel delivers nothing but SIGKILL to it."""
    from rljob_trainer.ranks.group import TrainerGroup

    job, pace = build_job(model), Pace(HangDetection(min_seconds=20, max_seconds=600))

    async def start(generation: str) -> Any:
        return await TrainerGroup.start(
            job, model=str(model), run=run, generation=generation, checkpoint=None, report=print, pace=pace
        )

    group = await start("g1")
    process_ids = group.process_ids
    watching = asyncio.create_task(group.watch())
    await update(group, build_rows(0))
    os.kill(process_ids[1], signal.SIGSTOP)
    updating = asyncio.create_task(update(group, build_rows(1)))
    with pytest.raises(TrainerGroupDiedError, match=r"rank 1 hangs in \w+") as died:
        await asyncio.wait_for(watching, DEADLINE_SECONDS)
    assert [part.name for part in died.value.hung] == ["rank 1"]
    assert not died.value.lost_node, "its Pod still runs"
    with suppress(TrainerGroupDiedError):
        await updating
    await group.close()
    restarted = await start("g2")
    assert (await update(restarted, build_rows(0))).num_tokens > 0
    await wait_for_end(process_ids)
    await restarted.close()
