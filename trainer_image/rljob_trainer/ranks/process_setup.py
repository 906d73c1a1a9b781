"""How a rank's process is set up: threads, memory, and the process group. Called once, before the first tensor."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta

import torch
import torch.distributed as dist

ENV_NUM_THREADS = "RLJOB_NUM_THREADS"
"""The user's OMP_NUM_THREADS, which the worker passes to its ranks: Ray sets that variable to 1."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # mallopt(3)
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Backstop alone: the group watches its ranks and kills those that hang after one has died."""


def keep_freed_memory() -> None:
    """Have glibc keep what is freed. Each update frees and takes the same gigabytes of activations and gradients;
    giving them back in between costs more in page faults than the arithmetic (2.0 s against 0.4 s of system time in
    an update of a 135M model)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_ARENA_MAX, 1)


def choose_num_threads(num_cores: int, num_local_ranks: int, asked: str | None) -> int:
    """Threads of one CPU rank: what the user asked for (OMP_NUM_THREADS), or a fair share of the machine."""
    if asked:
        return max(1, int(asked))
    return max(1, num_cores // num_local_ranks)


def join_process_group(rank: int, num_ranks: int, address: str, port: int, device: torch.device) -> None:
    """Meet the other ranks at rank 0's address."""
    if address.startswith("127."):
        # One machine with an address for each Pod: gloo would bind to the host name's address, which may be none.
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
