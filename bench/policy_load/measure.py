"""Updates of the trainer's policy on one rank or, under torchrun, on several; timed by part."""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from policy_load.operations import count_work
from policy_load.peak import known_peak, measure_peak
from policy_load.rows import Load, build_rows
from policy_load.shapes import MODELS, write_model
from rljob_api.manifest.job import RLJob
from rljob_inputs.memory.shapes import read_shape
from rljob_inputs.models.defaults import resolve_job
from rljob_trainer.episodes.types import TrainRow, UpdateVersions
from rljob_trainer.policy.layout import RankPlan, build_micro_batches, divide_rows
from rljob_trainer.policy.policy import Policy


@dataclass(frozen=True)
class Settings:
    model: str
    """A key of MODELS."""
    load: Load
    trainer: dict[str, Any]
    """Fields of spec.trainer."""
    device: str
    warmup: int
    updates: int
    peak: float | None
    """Operations per second of one device; None: known by name, or measured."""


@dataclass
class Times:
    """Seconds of one update."""

    plan: float = 0.0
    accumulate: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return self.plan + self.accumulate + self.optimizer


@dataclass
class Result:
    """Figures of all ranks together, unless they say otherwise."""

    device: str
    num_ranks: int
    num_threads: int
    num_parameters: int
    row_tokens_per_second: float
    """A prompt counts once per row, as a user counts."""
    tokens_per_second: float
    """A prompt counts once per group."""
    operations_per_second: float
    """Operations of one rank: see operations.py."""
    peak_operations_per_second: float
    """Peak of one rank."""
    is_peak_measured: bool
    share_of_peak: float
    share_of_forward_and_backward: float
    """The share of the peak while neither planning nor the optimizer runs."""
    padding: float
    """Share of the computed positions without a token."""
    num_micro_batches: int
    """Micro-batches of one rank in one update."""
    peak_memory_bytes: int
    """Peak memory of rank 0: torch.cuda.max_memory_allocated, or the largest resident memory of the process."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of an update, by part; the medians."""


def measure(settings: Settings) -> Result | None:
    """Return the figures on rank 0, and None on the others."""
    device = _join(settings.device)
    try:
        with tempfile.TemporaryDirectory(prefix="rljob-bench-") as folder:
            return _measure(settings, device, Path(folder))
    finally:
        dist.destroy_process_group()


def _measure(settings: Settings, device: torch.device, folder: Path) -> Result | None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    policy = _load(settings, device, folder)
    rows = build_rows(settings.load)
    say = _progress if rank == 0 else lambda text: None
    dtype, peaks, times = policy.dtype, [], []
    stated = settings.peak or (known_peak(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None)
    batches: list[Any] = []
    for number in range(settings.warmup + settings.updates):
        if stated is None:
            peaks.append(measure_peak(device, dtype))
        spent, batches = _update(policy, rows, settings.trainer["microBatchTokens"], device)
        say(f"update {number + 1} of {settings.warmup + settings.updates}: {spent.total:.2f} s")
        times.append(spent)
    peak = stated or statistics.median(peaks)
    if rank != 0:
        return None
    shape = read_shape(MODELS[settings.model])
    assert shape is not None
    work, kept = count_work(rows, shape), times[settings.warmup :]
    seconds = {part: statistics.median(asdict(each)[part] for each in kept) for part in asdict(kept[0])}
    total = statistics.median(each.total for each in kept)
    rate = work.operations / num_ranks / total
    computed = sum(batch.token_ids.size for batch in batches)
    used = sum(int((batch.trees >= 0).sum()) for batch in batches)
    return Result(
        device=_name(device),
        num_ranks=num_ranks,
        num_threads=torch.get_num_threads(),
        num_parameters=shape.num_parameters,
        row_tokens_per_second=work.row_tokens / total,
        tokens_per_second=work.needed_tokens / total,
        operations_per_second=rate,
        peak_operations_per_second=peak,
        is_peak_measured=stated is None,
        share_of_peak=rate / peak,
        share_of_forward_and_backward=work.operations / num_ranks / seconds["accumulate"] / peak,
        padding=1 - used / computed,
        num_micro_batches=len(batches),
        peak_memory_bytes=_peak_memory(device),
        seconds=seconds,
    )


def _update(policy: Policy, rows: list[TrainRow], limit: int, device: torch.device) -> tuple[Times, list[Any]]:
    """Return the times, and the micro-batches of this rank."""
    times, batches = Times(), []

    def timed(part: str, action: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        setattr(times, part, time.perf_counter() - started)
        return result

    def plan() -> Any:
        return _plan(
            rows,
            num_ranks=dist.get_world_size(),
            micro_batch_tokens=limit,
            layout=policy.layout,
            without_advantage=False,
            versions=UpdateVersions(0, 0, 1),
        )[dist.get_rank()]

    batches = timed("plan", plan)
    timed("accumulate", lambda: policy.accumulate(batches))
    timed("optimizer", lambda: policy.apply(float(sum(row.loss_mask.sum() for row in rows))))
    return times, batches


def _load(settings: Settings, device: torch.device, folder: Path) -> Policy:
    """Return the policy with random weights, which rank 0 writes where all ranks read them."""
    shared = [str(folder)]
    if dist.get_rank() == 0:
        _progress(f"writes random weights of the shape {settings.model} to {folder}")
        write_model(MODELS[settings.model], folder, device.type)
    dist.broadcast_object_list(shared)
    _progress(f"rank {dist.get_rank()} loads them")
    policy = Policy(build_job(settings.trainer), shared[0], device)
    dist.barrier()  # rank 0 deletes the folder when it ends
    return policy


def build_job(trainer: dict[str, Any]) -> RLJob:
    spec = {
        "model": {"source": "/model"},
        "data": {"train": {"source": "/data"}},
        "rewards": [{"name": "r", "http": {"url": "http://r"}}],
        "trainer": trainer,
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "policy"}, "spec": spec}
    return resolve_job(RLJob.model_validate(job), None)


def _join(device_type: str) -> torch.device:
    """Join the ranks that torchrun started; alone without it."""
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    store = None if "RANK" in os.environ else dist.HashStore()
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=store, rank=rank, world_size=num_ranks)
    return device


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _plan(rows: Sequence[TrainRow], **options: Any) -> list[RankPlan]:
    return [build_micro_batches(part) for part in divide_rows(rows, **options)]
