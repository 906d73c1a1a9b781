"""The Ray actor around one rank's Policy, and what brings its weights to the rollouts.

Invariant: if another rank is lost, calls raise RankLostError, so that the group does not take it for a user error.
"""

import logging
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import ENV_POD_IP, ENV_TOKEN
from rljob_api.wire.driver_status import TrainerChoices
from rljob_api.wire.logs import choose_format, configure_logging
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.devices.choose import choose_device
from rljob_trainer.liveness.judge import Beat
from rljob_trainer.liveness.stacks import describe_process, read_stacks
from rljob_trainer.policy import checkpoints
from rljob_trainer.policy.checkpoints import CheckpointSaver
from rljob_trainer.policy.layout import Layout, RankRows
from rljob_trainer.policy.micro_batches import build_micro_batches
from rljob_trainer.policy.policy import Policy
from rljob_trainer.policy.update_metrics import RankMetrics
from rljob_trainer.ranks.device_memory import configure_allocator, held_bytes, release_unused
from rljob_trainer.ranks.failures import typed_errors
from rljob_trainer.ranks.ray_node import ENV_NUM_THREADS
from rljob_trainer.ranks.results import RowFacts, split_facts
from rljob_trainer.ranks.weight_transport import WeightTransport, build_transport
from rljob_trainer.run_folder.client import RemoteFolder, reach
from rljob_trainer.run_folder.file_facts import Checkpoint, FileFacts
from rljob_trainer.run_folder.location import RunFolder
from rljob_trainer.weights.heap import keep_freed_memory
from rljob_trainer.weights.mapped import boot_id

SAVES = "saves"
"""Ray's concurrency group of `wait_for_save`: it waits next to the other methods, which all run in one thread."""
BEATS = "beats"
"""That of what a rank says while it works."""
PROCESS_NAME = b"ray::RankProcess"
"""How the command line of a rank begins."""
_BACKSTOP_SECONDS = 600
"""Added to hangDetection.maxSeconds for the collectives' own timeout: the group finds a hang before, and says whose."""


class RankFacts(NamedTuple):
    """What the ranks have decided at their start, by the model and the devices."""

    layout: Layout
    """How rows may share micro-batches."""
    choices: TrainerChoices
    why_file: str
    """Why weights come to the rollouts through a file, although the devices are shared; else empty."""


class RankProcess:
    """One rank. Methods that the group calls on all ranks at once are collectives."""

    def __init__(self) -> None:
        if choose_format() == "json":  # Ray sends it to the head's log
            configure_logging(logging.WARNING)
        self.address = os.environ.get(ENV_POD_IP) or ray.util.get_node_ip_address()
        self._transport: WeightTransport

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
    ) -> RankFacts:
        """Join the other ranks and load the model."""
        self.rank, self._run = rank, run
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
        self._transport, why_file = build_transport(self.policy, self.address)
        choices = TrainerChoices(
            recomputation=self.policy.recomputation,
            compiled=self.policy.is_compiled,
            weight_transfer=self._transport.kind,
        )
        return RankFacts(self.policy.layout, choices, why_file)

    @typed_errors
    def inspect(self, part: RankRows) -> RowFacts:
        batches = build_micro_batches(part)
        return split_facts(batches, self.policy.inspect(batches))

    @typed_errors
    def score(self, part: RankRows) -> RowFacts:
        batches = build_micro_batches(part)
        return split_facts(batches, self.policy.score(batches))

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
        """Gather what rollouts load. Rank 0 returns its manifest."""
        return self._transport.publish(generation, version)

    @typed_errors
    def give_weights(self, is_first: bool) -> int:
        """Hand the published weights over to the engines on this device that wait for them. Return their number.
        `is_first`: they are expected."""
        return self._transport.give(is_first=is_first)

    @typed_errors
    def withdraw_weights(self) -> None:
        """Let no engine ask for weights until the next version."""
        self._transport.withdraw()

    @typed_errors
    def save(self, folder: Path) -> None:
        self._saver.begin(self._reach(folder))

    @ray.method(concurrency_group=SAVES)
    @typed_errors
    def wait_for_save(self) -> dict[str, FileFacts]:
        """Return what this rank wrote, by path below the checkpoint's folder."""
        return {f"{checkpoints.TRAINER_FOLDER}/{name}": facts for name, facts in self._saver.wait().items()}

    @typed_errors
    def export(self, folder: Path, tokenizer_source: str, checkpoint: Checkpoint | None) -> float | None:
        if checkpoint is not None:
            saved = self._reach(checkpoint.folder)
            checkpoints.verify_checkpoint(checkpoint, saved, self.rank, dist.get_world_size())
            checkpoints.load_weights(self.policy, saved)
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
        # Not before `start` has built them.
        doing = self.policy.doing if hasattr(self, "policy") else ""
        num_waiting = self._transport.num_waiting if hasattr(self, "_transport") else 0
        groups: list[Any] = list(distributed_c10d._world.pg_map) if dist.is_initialized() else []
        num_collectives = sum(group._get_sequence_number_for_group() for group in groups)
        return Beat(num_collectives, doing, num_waiting)

    @ray.method(concurrency_group=BEATS)
    def dump_stacks(self) -> str:
        return read_stacks()

    @ray.method(concurrency_group=BEATS)
    def describe_process(self, pid: int) -> str:
        return describe_process(pid, PROCESS_NAME)

    def close(self) -> None:
        if hasattr(self, "_transport"):
            self._transport.close()

    def _reach(self, folder: Path) -> Path | RemoteFolder:
        return reach(self._run, folder, os.environ.get(ENV_TOKEN, ""))


def choose_num_threads(num_cores: int, num_local_ranks: int, requested: str | None) -> int:
    """Return the threads of one CPU rank: as requested (OMP_NUM_THREADS), or an equal share of the machine's cores."""
    return max(1, int(requested or num_cores // num_local_ranks))


def open_store(rank: int, num_ranks: int, address: str, port: int, timeout: timedelta) -> TCPStore:
    """Return the ranks' store, which rank 0 serves on `address` alone: it takes no token, and torch's own socket would
    listen on all addresses of the machine."""
    if rank:
        return TCPStore(address, port, num_ranks, timeout=timeout)
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family)
    except OSError as error:
        raise dist.DistNetworkError(f"cannot listen on {address}:{port}: {error}") from error
    # The store owns the descriptor from now on.
    return TCPStore(address, port, num_ranks, True, timeout, master_listen_fd=listener.detach())


def join_process_group(
    rank: int, num_ranks: int, address: str, port: int, device: torch.device, timeout: timedelta
) -> None:
    if address.startswith("127."):
        # Local runs have a loopback address per Pod. gloo would bind to the host name's address, if it has one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=open_store(rank, num_ranks, address, port, timeout),
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
