"""The Ray actor around one rank's Policy. Rank 0 also serves the weight files.

Invariant: if another rank is lost, calls raise RankLostError, so that the group does not take it for a user error.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import ENV_POD_IP, ENV_TOKEN
from rljob_api.wire.protocol import DigestUnit, WeightManifest
from rljob_inputs.memory.trainer import Recomputation
from rljob_trainer.devices.choose import choose_device
from rljob_trainer.policy import checkpoints
from rljob_trainer.policy.checkpoint_saver import CheckpointSaver
from rljob_trainer.policy.layout import Layout, RankRows
from rljob_trainer.policy.micro_batches import build_micro_batches
from rljob_trainer.policy.policy import Policy
from rljob_trainer.policy.update_metrics import RankMetrics
from rljob_trainer.ranks.device_memory import configure_allocator, held_bytes, release_unused
from rljob_trainer.ranks.failures import typed_errors
from rljob_trainer.ranks.heartbeat import Beat, count_collectives, describe_process, dump_stacks
from rljob_trainer.ranks.ray_node import ENV_NUM_THREADS
from rljob_trainer.ranks.results import RowFacts, split_facts
from rljob_trainer.run_folder.client import RemoteFolder, reach
from rljob_trainer.run_folder.file_facts import Checkpoint, FileFacts
from rljob_trainer.run_folder.location import RunFolder
from rljob_trainer.weights.checksum import choose_unit
from rljob_trainer.weights.heap import keep_freed_memory
from rljob_trainer.weights.mapped import TensorSpec, boot_id
from rljob_trainer.weights.store import WeightStore

SAVES = "saves"
"""Ray's concurrency group of `wait_for_save`: it waits next to the other methods, which all run in one thread."""
BEATS = "beats"
"""That of what a rank says while it works."""
_BACKSTOP_SECONDS = 600
"""Added to hangDetection.maxSeconds for the collectives' own timeout: the group finds a hang before, and says whose."""


class RankProcess:
    """One rank. Methods that the group calls on all ranks at once are collectives."""

    def __init__(self) -> None:
        self.address = os.environ.get(ENV_POD_IP) or ray.util.get_node_ip_address()
        self._store: WeightStore | None = None

    def describe(self) -> tuple[str, str, int, int]:
        """Return machine, address, process id, and a free port for the rendezvous."""
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            return boot_id(), self.address, os.getpid(), probe.getsockname()[1]

    @typed_errors
    def start(
        self,
        rank: int,
        num_ranks: int,
        num_local_ranks: int,
        rendezvous: tuple[str, int],
        job: RLJob,
        model: str,
        run: RunFolder,
        checkpoint: Checkpoint | None,
    ) -> tuple[Layout, Recomputation]:
        """Join the other ranks and load the model. Return how its rows may share micro-batches, and what its backward
        pass computes again."""
        self.rank, self._run = rank, run
        self._num_shards = max(1, job.spec.rollout.gpus_per_replica)
        if job.spec.trainer.gpus_per_replica:
            configure_allocator()
        self.device = choose_device(job.spec.trainer.gpus_per_replica, "spec.trainer.gpusPerReplica")
        if self.device.type == "cpu":
            keep_freed_memory()  # the activations of a GPU are not in the host's memory
        if self.device.type == "cpu" or job.spec.trainer.offloads_state:  # AdamW runs on the host's CPUs
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(choose_num_threads(cores, num_local_ranks, os.environ.get(ENV_NUM_THREADS)))
        limit = timedelta(seconds=job.spec.hang_detection.max_seconds + _BACKSTOP_SECONDS)
        join_process_group(rank, num_ranks, *rendezvous, self.device, limit)
        self.policy = Policy(job, model, self.device)
        if checkpoint is not None:
            folder = self._reach(checkpoint.folder)
            checkpoints.verify_checkpoint(checkpoint, folder, rank, num_ranks)
            checkpoints.load_checkpoint(self.policy, folder)
        self._saver = CheckpointSaver(self.policy, asynchronous=job.spec.saves_asynchronously)
        return self.policy.layout, self.policy.recomputation

    @typed_errors
    def inspect(self, part: RankRows) -> RowFacts:
        batches = build_micro_batches(part)
        return split_facts(batches, self.policy.inspect(batches))

    @typed_errors
    def accumulate(self, part: RankRows) -> None:
        self.policy.accumulate(build_micro_batches(part))

    @typed_errors
    def apply(self, denominator: float) -> RankMetrics:
        return self.policy.apply(denominator)

    def set_steps(self, steps: int) -> None:
        self.policy.num_steps = steps

    @typed_errors
    def publish(self, generation: str, version: int) -> WeightManifest | None:
        """Gather what rollouts load. Rank 0 writes the weight file and returns its manifest."""
        published = self.policy.stream_published()
        if self.rank != 0:
            for _ in published.tensors:
                pass
            return None
        if self._store is None:
            self._store = WeightStore(self.address, os.environ.get(ENV_TOKEN, ""))
        specs = {name: TensorSpec.of(tensor) for name, tensor in published.described.items()}
        unit: DigestUnit = "element"
        if published.has_plain_matrices:
            unit = choose_unit(specs.values(), self._num_shards)
        manifest = self._store.publish_stream(specs, published.tensors, generation, version, unit)
        if published.merge_cost is not None:
            manifest.merged_share = published.merge_cost.share
        return manifest

    @typed_errors
    def save(self, folder: Path) -> None:
        self._saver.begin(self._reach(folder))

    @ray.method(concurrency_group=SAVES)
    @typed_errors
    def wait_for_save(self) -> dict[str, FileFacts]:
        """Return what this rank wrote, by path below the checkpoint's folder."""
        return {f"{checkpoints.TRAINER_FOLDER}/{name}": facts for name, facts in self._saver.wait().items()}

    @typed_errors
    def export(self, folder: Path, tokenizer_source: str) -> float | None:
        return checkpoints.export_model(self.policy, self._reach(folder), tokenizer_source)

    @typed_errors
    def free(self) -> tuple[int, int]:
        """Return the bytes that this rank held and still holds of its device."""
        before = held_bytes(self.device)
        self.policy.free()
        release_unused(self.device)
        return before, held_bytes(self.device)

    @typed_errors
    def restore(self) -> None:
        self.policy.restore()

    @ray.method(concurrency_group=BEATS)
    def beat(self) -> Beat:
        policy: Policy | None = getattr(self, "policy", None)  # not before `start` has built it
        return Beat(count_collectives(), policy.micro_batch if policy else None)

    @ray.method(concurrency_group=BEATS)
    def dump_stacks(self) -> str:
        return dump_stacks()

    @ray.method(concurrency_group=BEATS)
    def describe_process(self, pid: int) -> str:
        return describe_process(pid)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _reach(self, folder: Path) -> Path | RemoteFolder:
        return reach(self._run, folder, os.environ.get(ENV_TOKEN, ""))


def choose_num_threads(num_cores: int, num_local_ranks: int, requested: str | None) -> int:
    """Return the threads of one CPU rank: as requested (OMP_NUM_THREADS), or an equal share of the machine's cores."""
    return max(1, int(requested or num_cores // num_local_ranks))


def join_process_group(
    rank: int, num_ranks: int, address: str, port: int, device: torch.device, timeout: timedelta
) -> None:
    if address.startswith("127."):
        # Local runs have a loopback address per Pod. gloo would bind to the host name's address, if it has one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
