"""What torch's memory tracker finds in the real policy: its update runs on fake tensors, which have no data.

The model, FSDP2, the optimizer, the loss and the order of calls are the trainer's own. Replaced: the weights' file, the
process group (torch's fake one, which is rank 0 of any number of ranks), and what reads values of tensors.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from memory_plan import accelerator
from memory_plan.cases import ALL_CASES, SHALLOW_CASES, Case
from rljob_inputs.memory import limits
from rljob_inputs.memory.trainer import (
    activation_bytes,
    critic_bytes,
    digest_bytes,
    gathered_bytes,
    gradient_bytes,
    layer_backward_bytes,
    logits_bytes,
    plan_publish,
    plan_rank,
    reference_bytes,
    state_bytes,
)
from rljob_trainer.policy import (
    attention,
    critic,
    model_loading,
    policy,
    selected_logprobs,
    sharding,
    update_metrics,
)
from rljob_trainer.policy.attention import initial_attention
from rljob_trainer.policy.layout import MicroBatch

_CPU = torch.device("cpu")
_OTHERS = str(_FSDPRefType.INP.value)
"""The kind that this bench does not use otherwise."""


@dataclass(frozen=True)
class Parts:
    """Bytes of one rank's device."""

    state: int
    others: int
    """What the reference model and the critic hold during the policy's update."""
    gathered: int
    gradients: int
    activations: int
    logits: int
    """The highest point of the backward pass above what was held before it."""
    total: int
    published: int
    """The highest point of a publication after an update, with the state and without digests."""


def planned(case: Case) -> Parts:
    """Return what the plan says."""
    work = case.build_work()
    return Parts(
        state=state_bytes(work) * (not work.offloads_state),
        others=reference_bytes(work) * (not work.offloads_reference) + critic_bytes(work),
        gathered=gathered_bytes(work),
        gradients=gradient_bytes(work),
        activations=activation_bytes(work),
        logits=max(logits_bytes(work), layer_backward_bytes(work)),
        total=max(moment.num_bytes for moment in plan_rank(work)),
        published=plan_publish(work, is_adapter=False).num_bytes - digest_bytes(work),
    )


def track(case: Case, device: torch.device = _CPU) -> Parts:
    """Return what the tracker finds in an update of two micro-batches per call."""
    dist.init_process_group("fake", rank=0, world_size=case.num_ranks, store=FakeStore())
    try:
        with replacements(case, device), FakeTensorMode(allow_non_fake_inputs=True):
            return _track(case, policy.Policy(case.build_job(), "/model", device))
    finally:
        dist.destroy_process_group()


def track_on_accelerator(case: Case) -> Parts:
    """Return what the tracker finds on the accelerator, which changes torch for the whole process that has it."""
    command = [sys.executable, "-m", "memory_plan.tracker", case.name]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Parts(**json.loads(done.stdout.splitlines()[-1]))


def _track(case: Case, rank: policy.Policy) -> Parts:
    device = rank.device
    for unit in (each for each in rank.model.modules() if isinstance(each, FSDPModule)):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for each in group.fsdp_params:  # as the first forward pass does: what was filled in takes its place
                each.reset_sharded_param()
    tracker = FSDPMemTracker(rank.model, rank.optimizer)
    before_head: dict[str, int] = {}
    head, expect = model_loading.selected_logprobs, sharding.expect_backward

    def record(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # not of the reference model
            _mark_others(tracker, rank)
            before_head.clear()
            before_head.update(_read(tracker, "current", device))
        return head(*args, **kwargs)

    def start_micro_batch(*args: Any, **kwargs: Any) -> None:
        tracker.reset_mod_stats()  # it counts one forward pass of each module
        expect(*args, **kwargs)

    batches = [build_batch(case)] * 2
    with (
        mock.patch.object(model_loading, "selected_logprobs", record),
        mock.patch.object(sharding, "expect_backward", start_micro_batch),
        tracker,
    ):
        _mark_others(tracker, rank)
        state = sum(_read(tracker, "current", device).get(kind, 0) for kind in ("Sharded Param", "OptState"))
        # In the second call, earlier gradients are sharded, and the critic has its own.
        for _ in range(2 if case.mode.reduce_once or case.has_critic else 1):
            rank.accumulate(batches)
        peak = _read(tracker, "peak", device)
        published = _publish(rank, tracker)
    gathered = sum(before_head.get(kind, 0) for kind in ("Unsharded Param", "All Gather"))
    # Whole gradients that add up are temporary for the tracker.
    gradients = sum(before_head.get(kind, 0) for kind in ("Sharded Grad", "Unsharded Grad", "Reduce Scatter", "Temp"))
    return Parts(
        state=state,
        others=before_head.get(_OTHERS, 0),
        gathered=gathered,
        gradients=gradients,
        activations=before_head["Activation"],
        logits=peak["Total"] - before_head["Total"],
        total=peak["Total"],
        published=published,
    )


def _clear(optimizer: torch.optim.AdamW, **_: object) -> float:
    """Stands for the step, which reads values: the gradients go."""
    optimizer.zero_grad()
    return 1.0


def _publish(rank: policy.Policy, tracker: FSDPMemTracker) -> int:
    """Gather all weights after an update, as all ranks do. Return the most that the device holds."""
    with (  # what reads values
        mock.patch.object(policy.optimizer, "step", _clear),
        mock.patch.object(update_metrics, "_reduce", lambda values, op: dict.fromkeys(values, 0.0)),
    ):
        rank.apply(1.0)
    highest = 0
    for _ in rank._stream_weights():
        highest = max(highest, _read(tracker, "current", rank.device)["Total"])
    return highest


def _mark_others(tracker: FSDPMemTracker, rank: policy.Policy) -> None:
    """Have the tracker count what belongs to the reference model and to the critic under their own kind."""
    tensors: list[Any] = []
    if rank.critic is not None:
        tensors += [value for state in rank.critic.optimizer.state.values() for value in state.values()]
    for model in (rank.reference, rank.critic and rank.critic.model):
        units = [] if model is None else [each for each in model.modules() if isinstance(each, FSDPModule)]
        for group in (group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups):
            for each in group.fsdp_params:
                whole = getattr(each, "_unsharded_param", None)
                grads = [each.sharded_param.grad, getattr(whole, "grad", None), each.unsharded_accumulated_grad]
                tensors += [each.sharded_param, whole, *each.all_gather_outputs, *grads]
    for tensor in tensors:
        if tensor is not None:
            tracker._update_and_maybe_create_winfos(tensor, _FSDPRefType.INP)


def _read(tracker: FSDPMemTracker, which: str, device: torch.device) -> dict[str, int]:
    snapshot = tracker.get_tracker_snapshot(which)[device]
    return {str(getattr(kind, "value", kind)): int(num_bytes) for kind, num_bytes in snapshot.items()}


def build_batch(case: Case) -> MicroBatch:
    """Return a full micro-batch, all of whose tokens are targets."""
    shape, count = (case.lines, case.length), case.lines * case.length
    zeros, index, ones = np.zeros(shape, np.int32), np.arange(count, dtype=np.int32), np.ones(count, np.float32)
    trees, branches = zeros, zeros + 1
    if case.has_masks:
        branches[:, case.length // 2 :] = 2
    if case.attention == "packed":
        trees = zeros + np.arange(case.lines, dtype=np.int32)[:, None]
        if case.group > 1:
            branches = zeros + (np.arange(case.length) // (case.length // (1 + case.group))).astype(np.int32)
        zeros, trees, branches = (each.reshape(1, -1) for each in (zeros, trees, branches))
    return MicroBatch(
        token_ids=zeros,
        position_ids=zeros,
        trees=trees,
        branches=branches,
        row_indices=np.arange(case.lines, dtype=np.int32),
        sources=index,
        targets=index * 0,
        rows=index // case.length,
        positions=index % case.length,
        weights=ones,
        temperatures=ones,
        advantages=ones,
        rollout_logprobs=-ones,
        proximal_shares=ones,
        returns=ones,
        values=ones,
    )


@contextlib.contextmanager
def replacements(case: Case, device: torch.device) -> Iterator[None]:
    """Replace what the module's header names. `device`: the CPU, or the accelerator."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

    transformers.logging.set_verbosity_error()
    mesh = sharding.build_mesh(device)
    config = AutoConfig.for_model(**case.config)

    def load(source: str, *, dtype: torch.dtype, attention: str, **others: Any) -> model_loading.OpenedModel:
        initial = initial_attention(AutoModelForCausalLM, config, attention)
        if device.type != "cpu":
            return _open_on_accelerator(config, device, dtype=dtype, attention=initial)
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=initial)
        return model_loading.OpenedModel(network, lambda device: None)

    work = case.build_work()
    columns = limits.count_block_columns(work.tokens, work.shape.vocabulary, work.bytes_per_logit)
    block_rows = limits.count_block_rows(columns, on_cpu=not case.on_gpu)
    with (
        mock.patch.object(policy, "open_network", load),
        mock.patch.object(sharding, "build_mesh", return_value=mesh),
        mock.patch.object(sharding, "choose_mode", return_value=case.mode),
        mock.patch.object(selected_logprobs, "count_block_rows", return_value=block_rows),
        # A fake parameter cannot be moved; adapters are created where they belong.
        mock.patch.object(torch.nn.Module, "to", lambda module, *args, **kwargs: module),
        # It compares positions, to skip the mask of plain lines, as for real tensors.
        mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
        mock.patch.object(attention, "_obstacle", return_value=None),
        mock.patch.object(critic, "nn", SimpleNamespace(**vars(nn) | {"Linear": partial(nn.Linear, device=device)})),
        # Fake tensors have no pinned memory.
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: tensor.device.type == "cpu"),
    ):
        yield


def _open_on_accelerator(
    config: Any, device: torch.device, *, dtype: torch.dtype, attention: str
) -> model_loading.OpenedModel:
    """Return a network on the meta device, as a real one is opened, whose shards are filled with fake tensors."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        network: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    for module in network.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)  # type: ignore[arg-type]

    def fill(target: torch.device) -> None:
        filled: dict[int, nn.Parameter] = {}  # tied parameters stay one
        for module in network.modules():
            for name, each in module._parameters.items():
                if isinstance(each, DTensor):
                    local = torch.empty_like(each.to_local(), device=target)
                    shard = DTensor(local, each._spec, requires_grad=False)
                    module._parameters[name] = filled.setdefault(
                        id(each), nn.Parameter(shard, requires_grad=each.requires_grad)
                    )

    return model_loading.OpenedModel(network, fill)


if __name__ == "__main__":
    named = next(case for case in ALL_CASES + SHALLOW_CASES if case.name == sys.argv[1])
    print(json.dumps(asdict(track(named, accelerator.register()))))
