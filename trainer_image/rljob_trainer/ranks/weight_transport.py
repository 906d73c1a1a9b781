"""How the ranks' weights come to the rollouts: through a file, or, on shared devices, from each rank to the engines on
its device.

Invariant: all ranks of a group use the same transport, whose methods are collectives.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.roles import WeightTransfer
from rljob_api.wire.contract import ENV_HAND_OVER, ENV_TOKEN
from rljob_api.wire.weights import DigestUnit, WeightManifest
from rljob_trainer.policy.policy import Policy
from rljob_trainer.policy.published import Published
from rljob_trainer.ranks.device_memory import release_unused
from rljob_trainer.weights import cuda_ipc
from rljob_trainer.weights.checksum import Digest, choose_unit, digest_on_device, digest_tensor
from rljob_trainer.weights.hand_over import ANSWER_SECONDS, BUCKET_BYTES, HandOver
from rljob_trainer.weights.mapped import TensorSpec
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

    def publish(self, generation: str, version: int) -> WeightManifest | None:
        """Make the policy's weights a version. Return its manifest on rank 0."""
        published = self._policy.stream_published()
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
