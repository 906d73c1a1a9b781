"""What torch's memory tracker finds in the real policy: its update runs on fake tensors, which have no data.

The model, FSDP2, the optimizer, the loss function's head and the order of calls are the trainer's own. Replaced: the
weights' file, the process group (torch's fake one, which is rank 0 of any number of ranks), the loss per token (its
values decide which tokens count, and its tensors are small), and what reads values of tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from memory_plan.cases import Case
from rljob_inputs.memory import limits
from rljob_inputs.memory.trainer import (
    activation_bytes,
    gathered_bytes,
    gradient_bytes,
    layer_backward_bytes,
    logits_bytes,
    plan_rank,
    state_bytes,
)
from rljob_trainer.policy import model_loading, policy, selected_logprobs, sharding
from rljob_trainer.policy.micro_batches import MicroBatch

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Parts:
    """Bytes of one rank."""

    state: int
    gathered: int
    gradients: int
    activations: int
    logits: int
    """The highest point of the backward pass above what was held before it."""
    total: int


def planned(case: Case) -> Parts:
    """Return what the plan says."""
    work = case.build_work()
    return Parts(
        state=state_bytes(work),
        gathered=gathered_bytes(work),
        gradients=gradient_bytes(work),
        activations=activation_bytes(work),
        logits=max(logits_bytes(work), layer_backward_bytes(work)),
        total=plan_rank(work)[0].num_bytes,
    )


def track(case: Case) -> Parts:
    """Return what the tracker finds in an update of two micro-batches per call."""
    dist.init_process_group("fake", rank=0, world_size=case.num_ranks, store=FakeStore())
    try:
        with _replacements(case), FakeTensorMode(allow_non_fake_inputs=True):
            return _track(case, policy.Policy(case.build_job(), "/model", _CPU))
    finally:
        dist.destroy_process_group()


def _track(case: Case, rank: policy.Policy) -> Parts:
    tracker = FSDPMemTracker(rank.model, rank.optimizer)
    before_head: dict[str, int] = {}
    head, expect = model_loading.selected_logprobs, sharding.expect_backward

    def record(*args: Any, **kwargs: Any) -> Any:
        before_head.clear()
        before_head.update(_read(tracker, "current"))
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
        state = sum(_read(tracker, "current").get(kind, 0) for kind in ("Sharded Param", "OptState"))
        for _ in range(2 if case.mode.reduce_once else 1):  # in the second call, earlier gradients are sharded
            rank.accumulate(batches)
    peak = _read(tracker, "peak")
    gathered = sum(before_head.get(kind, 0) for kind in ("Unsharded Param", "All Gather"))
    # Whole gradients that add up are temporary for the tracker.
    gradients = sum(before_head.get(kind, 0) for kind in ("Sharded Grad", "Unsharded Grad", "Reduce Scatter", "Temp"))
    return Parts(
        state=state,
        gathered=gathered,
        gradients=gradients,
        activations=before_head["Activation"],
        logits=peak["Total"] - before_head["Total"],
        total=peak["Total"],
    )


def _read(tracker: FSDPMemTracker, which: str) -> dict[str, int]:
    snapshot = tracker.get_tracker_snapshot(which)[_CPU]
    return {str(getattr(kind, "value", kind)): int(num_bytes) for kind, num_bytes in snapshot.items()}


def build_batch(case: Case) -> MicroBatch:
    """Return a full micro-batch, all of whose tokens are targets."""
    shape, count = (case.lines, case.length), case.lines * case.length
    zeros, index, ones = np.zeros(shape, np.int32), np.arange(count, dtype=np.int32), np.ones(count, np.float32)
    branches = zeros + 1
    if case.has_masks:
        branches[:, case.length // 2 :] = 2
    return MicroBatch(
        token_ids=zeros,
        position_ids=zeros,
        trees=zeros,
        branches=branches,
        row_indices=np.arange(case.lines, dtype=np.int32),
        sources=index,
        targets=index * 0,
        rows=index // case.length,
        positions=index % case.length,
        weights=ones,
        advantages=ones,
        rollout_logprobs=-ones,
        proximal_shares=ones,
    )


@dataclass
class _Terms:
    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


def _simple_loss(code: Any, inputs: Any, *, weights: torch.Tensor, **others: Any) -> _Terms:
    return _Terms((inputs.logprobs * weights).sum(), {}, {})


@contextlib.contextmanager
def _replacements(case: Case) -> Iterator[None]:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

    transformers.logging.set_verbosity_error()
    mesh = sharding.build_mesh(_CPU, case.num_copies)
    config = AutoConfig.for_model(**case.config)

    def load(source: str, *, dtype: torch.dtype, attention: str, options: dict[str, Any]) -> model_loading.OpenedModel:
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        return model_loading.OpenedModel(network, lambda device: None)

    block_rows = limits.DEVICE_BLOCK_ROWS if case.on_gpu else limits.BLOCK_ROWS
    with (
        mock.patch.object(policy, "open_network", load),
        mock.patch.object(sharding, "build_mesh", return_value=mesh),
        mock.patch.object(policy, "update_loss", _simple_loss),
        mock.patch.object(sharding, "choose_mode", return_value=case.mode),
        mock.patch.object(selected_logprobs, "BLOCK_ROWS", block_rows),
        # A fake parameter cannot be moved; adapters are created where they belong.
        mock.patch.object(torch.nn.Module, "to", lambda module, *args, **kwargs: module),
        # It compares positions, to skip the mask of plain lines, as for real tensors.
        mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
    ):
        yield
