"""What the Ray actor of a rank does with its Policy, and what brings its weights to the rollouts.

Invariant: if another rank is lost, calls raise RankLostError, so that the group does not take it for a user error.

Weights come to the rollouts through a file, or, on shared devices, from each rank to the engines on its device.
Invariant: all ranks of a group use the same transport, whose methods are collectives.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import ray
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.manifest.roles import WeightTransfer
from rljob_api.wire.contract import ENV_HAND_OVER, ENV_POD_IP, ENV_TOKEN
from rljob_api.wire.driver_status import TrainerChoices
from rljob_api.wire.logs import choose_format, configure_logging
from rljob_api.wire.weights import DigestUnit, WeightManifest
from rljob_trainer.devices import choose_device
from rljob_trainer.liveness.judge import Beat
from rljob_trainer.liveness.stacks import describe_process, read_stacks
from rljob_trainer.policy import checkpoints
from rljob_trainer.policy.checkpoints import CheckpointSaver
from rljob_trainer.policy.layout import RankRows, build_micro_batches
from rljob_trainer.policy.policy import Policy, Published
from rljob_trainer.policy.update_metrics import RankMetrics
from rljob_trainer.ranks.failures import typed_errors
from rljob_trainer.ranks.ray_node import ENV_NUM_THREADS, PROCESS_NAME
from rljob_trainer.ranks.results import RankFacts, RowFacts, split_facts
from rljob_trainer.run_folder.client import RemoteFolder, RunFolder, reach
from rljob_trainer.run_folder.file_facts import Checkpoint, FileFacts
from rljob_trainer.weights import cuda_ipc
from rljob_trainer.weights.checksum import Digest, choose_unit, digest_on_device, digest_tensor
from rljob_trainer.weights.hand_over import ANSWER_SECONDS, BUCKET_BYTES, HandOver
from rljob_trainer.weights.heap import configure_allocator, held_bytes, keep_freed_memory, release_unused
from rljob_trainer.weights.mapped import TensorSpec, boot_id
from rljob_trainer.weights.store import WeightStore

log = logging.getLogger(__name__)

_FIRST_SECONDS = 5.0
"""For the engine on this device to ask for weights, after it was woken to load them."""
_ANOTHER = "another rank cannot hand its weights over: see its log"
Kind = Literal["file", "device"]


class FileTransport:
    """Rank 0 writes a file, which rollouts map or download whenever they need it."""

    kind: Kind = "file"
    num_waiting = 0

    def __init__(self, policy: Policy, address: str, num_shards: int) -> None:
        self._policy, self._address, self._num_shards = policy, address, num_shards
        self._store: WeightStore | None = None

    def publish(self, generation: str, version: int, published: Published | None = None) -> WeightManifest | None:
        """Make the policy's weights a version, or what is given. Return its manifest on rank 0."""
        published = published or self._policy.stream_published()
        if dist.get_rank() != 0:
            _take(published.tensors)
            return None
        if self._store is None:
            self._store = WeightStore(self._address, os.environ.get(ENV_TOKEN, ""))
        specs = {name: TensorSpec.of(tensor) for name, tensor in published.described.items()}
        unit = _choose_unit(published, self._num_shards)
        manifest = self._store.publish_stream(specs, published.tensors, generation, version, unit)
        return _with_share(manifest, published)

    def give(self, *, is_first: bool) -> int:
        raise AssertionError("rollouts load the file")

    def withdraw(self) -> None: ...

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class DeviceTransport:
    """Each rank gathers the weights once for their digest, in the trainer's turn, and once more for the engines on its
    device. Then the policy's state is in host memory, and so is nothing else of the weights."""

    kind: Kind = "device"

    def __init__(self, policy: Policy, folder: Path, num_shards: int) -> None:
        self._policy, self._num_shards = policy, num_shards
        token, limit = os.environ.get(ENV_TOKEN, ""), policy.spec.hang_detection.min_seconds
        # An engine that hangs is dropped before the call counts as one of ranks that hang, which ends their group.
        self.hand_over = HandOver(folder, token, policy.device, BUCKET_BYTES, min(ANSWER_SECONDS, limit / 2))

    def publish(self, generation: str, version: int) -> WeightManifest | None:
        """Make the policy's weights a version. Return its manifest on rank 0."""
        published = self._policy.stream_published()
        manifest = None
        if dist.get_rank() == 0:
            manifest = digest_published(published, generation, version, _choose_unit(published, self._num_shards))
        _take(published.tensors)
        self.hand_over.allow(f"{generation}:{version}")
        return manifest

    def give(self, *, is_first: bool) -> int:
        """Hand the version over to the engines that wait for it. Return how many have got it. `is_first`: they are
        expected."""
        tensors = self._policy.stream_published(on_all_ranks=True).tensors
        wait_seconds = _FIRST_SECONDS if is_first else 0.0
        return self.hand_over.give(tensors, wait_seconds, lambda: release_unused(self._policy.device))

    def withdraw(self) -> None:
        """Let no engine ask for weights until the next version. Not a collective."""
        self.hand_over.allow("")

    @property
    def num_waiting(self) -> int:
        """Engines that wait for weights. For any thread."""
        return self.hand_over.num_waiting

    def close(self) -> None:
        self.hand_over.close()


WeightTransport = FileTransport | DeviceTransport


def build_transport(policy: Policy, address: str) -> tuple[WeightTransport, str]:
    """Return the transport of all ranks, and why it is a file although the job could use the device; else empty. A
    collective. UserError if the job asks for what does not work."""
    spec = policy.spec
    num_shards = max(1, spec.rollout.gpus_per_replica)
    wanted = choose_kind(spec)
    if wanted == "file":
        return FileTransport(policy, address, num_shards), ""
    obstacle = _agree(_find_obstacle(policy), policy.device)
    if not obstacle:
        return DeviceTransport(policy, Path(os.environ[ENV_HAND_OVER]), num_shards), ""
    if spec.rollout.weight_transfer == "device":
        raise UserError(f"spec.rollout.weightTransfer: device does not work here: {obstacle}; set file, or remove it")
    return FileTransport(policy, address, num_shards), obstacle


def choose_kind(spec: RLJobSpec) -> Kind:
    setting: WeightTransfer = spec.rollout.weight_transfer
    if setting == "auto":
        return "device" if spec.shares_trainer and spec.trainer.gpus_per_replica else "file"
    return setting


def digest_published(published: Published, generation: str, version: int, unit: DigestUnit) -> WeightManifest:
    """Return the manifest of weights that are in no file. Takes all tensors."""
    digest, values, num_bytes = Digest(), list[Tensor](), 0
    for _, tensor in published.tensors:
        num_bytes += tensor.nbytes
        if tensor.device.type == "cpu":
            # Of a copy: FSDP cannot free memory that numpy has seen.
            digest += digest_tensor(tensor.clone(), unit)
        elif tensor.numel():
            values.append(digest_on_device(tensor, unit))  # does not wait for the device
    digest = sum(map(Digest.of_device, values), start=digest)
    manifest = WeightManifest(
        generation=generation, version=version, num_bytes=num_bytes, checksum=str(digest), digest_unit=unit
    )
    return _with_share(manifest, published)


def _find_obstacle(policy: Policy) -> str:
    """Return why this rank cannot hand its weights over; empty if it can."""
    if not policy.streams_weights:
        return "rollouts load an adapter, or the weights have another form in a checkpoint"
    if not os.environ.get(ENV_HAND_OVER):
        return f"{ENV_HAND_OVER} is not set"
    return "" if policy.device.type == "cpu" else cuda_ipc.find_obstacle(policy.device)


def _agree(obstacle: str, device: torch.device) -> str:
    """Return an obstacle if any rank has one. A collective."""
    has_obstacle = torch.tensor(int(bool(obstacle)), device=device)
    dist.all_reduce(has_obstacle, dist.ReduceOp.MAX)
    return obstacle or (_ANOTHER if int(has_obstacle) else "")


def _choose_unit(published: Published, num_shards: int) -> DigestUnit:
    return choose_unit(published.described.values(), num_shards) if published.has_plain_matrices else "element"


def _with_share(manifest: WeightManifest, published: Published) -> WeightManifest:
    if published.merge_cost is not None:
        manifest.merged_share = published.merge_cost.share
    return manifest


def _take(tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Gathering them is a collective."""
    for _ in tensors:
        pass


_BACKSTOP = timedelta(days=14)
"""The collectives' own timeout, which cannot follow the spec: the group finds a hang before, and says whose. In
milliseconds it has 31 bits."""


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
        join_process_group(rank, num_ranks, *rendezvous, self.device)
        self.policy = Policy(job, model, self.device)
        if checkpoint is not None:
            folder = self._reach(checkpoint.folder)
            checkpoints.verify_checkpoint(checkpoint, folder, rank, num_ranks)
            checkpoints.load_checkpoint(self.policy, folder)
            # schedule.miniBatches may have changed, and with it the number of updates to which the step corresponds.
            step = int(checkpoint.folder.name.removeprefix("step-"))
            self.policy.num_updates = step * job.spec.schedule.mini_batches
        self._saver = CheckpointSaver(self.policy, asynchronous=job.spec.saves_asynchronously)
        self._transport, why_file = build_transport(self.policy, self.address)
        choices = TrainerChoices(
            recomputation=self.policy.plan.recomputation,
            micro_batch_tokens=self.policy.plan.micro_batch_tokens,
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

    @typed_errors
    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(self, *arguments)`, which may be a collective."""
        return function(self, *arguments)

    def follow(self, spec: RLJobSpec) -> None:
        """`spec`: with the schedule and the sampling of now."""
        self.policy.spec = spec

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

    def beat(self) -> Beat:
        # Not before `start` has built them.
        doing = self.policy.doing if hasattr(self, "policy") else ""
        num_waiting = self._transport.num_waiting if hasattr(self, "_transport") else 0
        groups: list[Any] = list(distributed_c10d._world.pg_map) if dist.is_initialized() else []
        num_collectives = sum(group._get_sequence_number_for_group() for group in groups)
        return Beat(num_collectives, doing, num_waiting)

    def dump_stacks(self) -> str:
        return read_stacks()

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


def join_process_group(rank: int, num_ranks: int, address: str, port: int, device: torch.device) -> None:
    if address.startswith("127."):
        # Local runs have a loopback address per Pod. gloo would bind to the host name's address, if it has one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=open_store(rank, num_ranks, address, port, _BACKSTOP),
        rank=rank,
        world_size=num_ranks,
        timeout=_BACKSTOP,
        device_id=None if device.type == "cpu" else device,
    )
