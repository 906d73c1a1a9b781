"""The Ray actor around one rank's Policy. Rank 0 also serves the weight files.

Invariant: if another rank is lost, calls raise RankLostError, so that the group does not take it for a user error.
"""

from __future__ import annotations

import ctypes
import os
import socket
from datetime import timedelta
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import ENV_POD_IP, ENV_TOKEN
from rljob_api.wire.protocol import WeightManifest
from rljob_trainer.policy import checkpoints
from rljob_trainer.policy.micro_batches import RankPlan
from rljob_trainer.policy.policy import BatchFacts, Policy
from rljob_trainer.policy.update_metrics import RankMetrics
from rljob_trainer.ranks.failures import typed_errors
from rljob_trainer.ranks.ray_node import ENV_NUM_THREADS
from rljob_trainer.weights.store import WeightStore

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # mallopt(3)
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Only a backstop: the group watches its ranks, and kills those that hang after another one died."""


class RankProcess:
    """One rank. Methods that the group calls on all ranks at once are collectives."""

    def __init__(self) -> None:
        keep_freed_memory()
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.address = os.environ.get(ENV_POD_IP) or ray.util.get_node_ip_address()
        self._store: WeightStore | None = None

    def describe(self) -> tuple[str, str, int, int]:
        """Return machine, address, process id, and a free port for the rendezvous."""
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            return _BOOT_ID.read_text(), self.address, os.getpid(), probe.getsockname()[1]

    @typed_errors
    def start(
        self,
        rank: int,
        num_ranks: int,
        num_local_ranks: int,
        rendezvous: tuple[str, int],
        job: RLJob,
        model: str,
        checkpoint: Path | None,
    ) -> bool:
        """Join the other ranks and load the model. Return whether rows of this model can share prompts."""
        self.rank = rank
        if self.device.type == "cpu":
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(choose_num_threads(cores, num_local_ranks, os.environ.get(ENV_NUM_THREADS)))
        join_process_group(rank, num_ranks, *rendezvous, self.device)
        self.policy = Policy(job, model, self.device)
        if checkpoint is not None:
            checkpoints.load_checkpoint(self.policy, checkpoint)
        return self.policy.can_share_prompts

    @typed_errors
    def inspect(self, plan: RankPlan) -> list[BatchFacts]:
        return self.policy.inspect(plan)

    @typed_errors
    def accumulate(self, plan: RankPlan) -> None:
        self.policy.accumulate(plan)

    @typed_errors
    def apply(self, denominator: float) -> RankMetrics:
        return self.policy.apply(denominator)

    def set_steps(self, steps: int) -> None:
        self.policy.num_steps = steps

    @typed_errors
    def publish(self, generation: str, version: int) -> WeightManifest | None:
        """Gather what rollouts load. Rank 0 writes the weight file and returns its manifest."""
        weights = self.policy.gather_published()
        if self.rank != 0:
            return None
        if self._store is None:
            self._store = WeightStore(self.address, os.environ.get(ENV_TOKEN, ""))
        return self._store.publish(weights, generation, version)

    @typed_errors
    def save(self, folder: Path) -> None:
        checkpoints.save_checkpoint(self.policy, folder)

    @typed_errors
    def export(self, folder: Path, tokenizer_source: str) -> None:
        checkpoints.export_model(self.policy, folder, tokenizer_source)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory. Each update allocates the same gigabytes for activations and gradients. To return
    them costs 2.0 s instead of 0.4 s of system time in page faults, per update of a 135M model."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_ARENA_MAX, 1)


def choose_num_threads(num_cores: int, num_local_ranks: int, requested: str | None) -> int:
    """Return the threads of one CPU rank: as requested (OMP_NUM_THREADS), or an equal share of the machine's cores."""
    return max(1, int(requested or num_cores // num_local_ranks))


def join_process_group(rank: int, num_ranks: int, address: str, port: int, device: torch.device) -> None:
    if address.startswith("127."):
        # Local runs have a loopback address per Pod. gloo would bind to the host name's address, if it has one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=None if device.type == "cpu" else device,
    )
