"""What the ranks do for a client: its adapter, gradient and optimizer state. Each function is a collective, which
TrainerGroup calls with every rank.

An adapter of fewer ranks than the service was started with is one whose other rows and columns are zero. The devices
have one adapter; the others sleep in host memory, each with its gradient and its optimizer's state. Invariant: every
function leaves all ranks with the same adapter.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from rljob_api.wire.weights import WeightManifest, slot_name
from rljob_trainer.policy import checkpoints, optimizer
from rljob_trainer.policy.arrays import to_device
from rljob_trainer.policy.layout import MicroBatch, RankRows, build_micro_batches
from rljob_trainer.policy.lora import Adapters
from rljob_trainer.policy.policy import Policy, Published
from rljob_trainer.policy.sharding import fill_gradients
from rljob_trainer.ranks.actor import FileTransport, RankProcess
from rljob_trainer.ranks.results import RowFacts, split_facts
from rljob_trainer.tinker.losses import compute_loss

ALPHA = 32
"""Tinker's: the scale of an adapter is ALPHA / rank."""
Facts = Mapping[str, NDArray[Any]]
"""`targets` of a row, and the inputs of its loss. All [targets]."""


@dataclass(frozen=True)
class _Sleeping:
    rank: int
    num_updates: int
    tensors: list[Tensor]
    """Copies of what _list_state returns."""


_SLEEPING: dict[str, _Sleeping] = {}
"""This process's part of each model that has no turn."""


@torch.no_grad()
def hold(rank: RankProcess, before: str, model: str, models: Collection[str]) -> None:
    """Let `before` sleep, and wake `model`; one that is new has nothing of another. Forget what is not in `models`."""
    policy = rank.policy
    policy.reshard()
    state = _list_state(policy)
    copies = [tensor.to("cpu", copy=True) for tensor in state]
    _SLEEPING[before] = _Sleeping(_adapters(policy).config.r, policy.num_updates, copies)
    if (found := _SLEEPING.pop(model, None)) is not None:
        for tensor, kept in zip(state, found.tensors, strict=True):
            tensor.copy_(kept)
        _adapters(policy).set_rank(found.rank, ALPHA)
        policy.num_updates = found.num_updates
    else:
        create(rank, 1, 0)
    for ended in _SLEEPING.keys() - set(models):
        del _SLEEPING[ended]


def _list_state(policy: Policy) -> list[Tensor]:
    """Return this rank's shards of the adapter, of its gradient and of its optimizer's state."""
    fill_gradients(policy.model)
    found = [
        each
        for parameter, state in policy.optimizer.state.items()
        for each in (parameter, parameter.grad, *state.values())
    ]
    return [each.to_local() if isinstance(each, DTensor) else each for each in found]


def create(rank: RankProcess, lora_rank: int, seed: int) -> None:
    """Begin an adapter whose update is zero."""
    policy = rank.policy
    policy.reshard()
    _adapters(policy).reset(lora_rank, ALPHA, seed)
    _forget(policy)


def load(rank: RankProcess, folder: Path, lora_rank: int, with_optimizer: bool) -> None:
    """Continue with the adapter of a checkpoint, and with its optimizer state, or none."""
    policy = rank.policy
    _forget(policy)
    (checkpoints.load_checkpoint if with_optimizer else checkpoints.load_weights)(policy, folder)
    _adapters(policy).set_rank(lora_rank, ALPHA)


def forward_backward(
    rank: RankProcess,
    rows: tuple[RankRows, Mapping[int, Facts]],
    loss: str,
    settings: Mapping[str, float],
    backward: bool,
) -> tuple[RowFacts, float]:
    """Return the log-probs of the targets, and this rank's part of the loss. `backward`: add its gradient to what the
    next update uses."""
    part, facts = rows
    policy, device = rank.policy, rank.device
    batches = [_set_targets(batch, facts) for batch in build_micro_batches(part)]
    total = 0.0

    def compute(batch: MicroBatch, logprobs: Tensor) -> Tensor:
        nonlocal total
        names = next(iter(facts.values()), {"weights": np.zeros(0)}).keys() - {"targets"}
        inputs = {name: to_device(_join(batch, facts, name, np.float32), device) for name in names}
        if not facts or batch.row_indices[0] < 0:  # an idle micro-batch takes part in the collectives alone
            return logprobs.sum() * 0
        value = compute_loss(loss, settings, logprobs, inputs)
        total += value.item()
        return value

    if backward:
        found = policy.backward(batches, compute)
    else:
        found = policy.score(batches)
        for batch, each in zip(batches, found, strict=True):
            compute(batch, torch.from_numpy(each.logprobs).to(device))
    return split_facts(batches, found), total


def _set_targets(batch: MicroBatch, facts: Mapping[int, Facts]) -> MicroBatch:
    """Return the micro-batch with the targets of the data, which need not be the tokens that follow."""
    return batch if batch.row_indices[0] < 0 else replace(batch, targets=_join(batch, facts, "targets", np.int32))


def _join(batch: MicroBatch, facts: Mapping[int, Facts], name: str, dtype: type) -> NDArray[Any]:  # [targets]
    if batch.row_indices[0] < 0:
        return np.zeros(1, dtype)
    return np.concatenate([facts[index][name] for index in batch.row_indices.tolist()], dtype=dtype)


def update(rank: RankProcess, adam: Mapping[str, float]) -> tuple[float, int]:
    """Run one step of AdamW with the gradient so far. Return the gradient's norm, and the number of updates. With a
    norm that is not finite, nothing changes but the number."""
    policy = rank.policy
    for group in policy.optimizer.param_groups:
        group["betas"], group["eps"] = (adam["beta1"], adam["beta2"]), adam["eps"]
        group["weight_decay"] = adam["weight_decay"]
    settings = policy.algorithm.optimizer.model_copy(update={"max_grad_norm": adam["grad_clip_norm"] or None})
    norm = optimizer.update(policy.model, policy.optimizer, settings, 1.0, adam["learning_rate"], policy.dtype)
    policy.num_updates += 1
    return norm, policy.num_updates


def write_adapter(rank: RankProcess, folder: Path, lora_rank: int) -> None:
    """Write what peft and `vllm serve --enable-lora` load, without the rows and columns beyond `lora_rank`."""
    rank.policy.reshard()
    adapters = _adapters(rank.policy)
    gathered = adapters.gather()
    if dist.get_rank() == 0:
        cut = {name: t[:lora_rank] if ".lora_A." in name else t[:, :lora_rank] for name, t in gathered.items()}
        adapters.save(cut, folder)
    dist.barrier()


_PUBLISHED: dict[int, Mapping[str, Tensor]] = {}
"""What each slot of the rollouts has, by its number from 1; on rank 0."""


def publish(
    rank: RankProcess, slots: int, slot: int, folder: Path | None, generation: str, version: int
) -> WeightManifest | None:
    """Put the adapter that was written to `folder` into one of the `slots` of the rollouts; None: one whose update is
    zero, as those of slots that were never filled. Return None if its files are gone: an error would end the ranks."""
    transport = rank._transport
    assert isinstance(transport, FileTransport), "a service has rollouts of their own"
    if dist.get_rank() != 0:
        return None
    empty = _read_adapter(rank.policy, None)
    try:
        _PUBLISHED[slot] = _read_adapter(rank.policy, folder)
    except FileNotFoundError:
        return None
    tensors = {
        f"{slot_name(number)}.{name}": tensor
        for number in range(1, slots + 1)
        for name, tensor in _PUBLISHED.get(number, empty).items()
    }
    return transport.publish(generation, version, Published.of(tensors))


def _read_adapter(policy: Policy, folder: Path | None) -> dict[str, Tensor]:
    """Return the adapter as engines hold it: of the service's rank, and of scale 1."""
    from safetensors.torch import load_file

    found = {} if folder is None else load_file(folder / "adapter_model.safetensors")
    tensors = {}
    for name, shape in _adapters(policy).shapes.items():
        tensors[name] = torch.zeros(shape, dtype=policy.dtype)
        if (value := found.get(name)) is not None:
            scale = 1.0 if ".lora_A." in name else ALPHA / value.shape[1]
            tensors[name][: value.shape[0], : value.shape[1]] = value * scale
    return tensors


def _forget(policy: Policy) -> None:
    """Drop the gradient and the optimizer's state."""
    policy.optimizer.zero_grad()
    for state in policy.optimizer.state.values():
        for value in state.values():
            value.zero_()
    policy.num_updates = 0


def _adapters(policy: Policy) -> Adapters:
    assert policy.adapters is not None, "a service trains adapters"
    return policy.adapters
