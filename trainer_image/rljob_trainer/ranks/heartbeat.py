"""What a rank says about itself while it works: how far it is, and its stacks.

Runs in a thread of the rank, next to the call that it works on. A process that is stopped, or whose thread holds the
interpreter, says nothing; a rank that waits in a collective does.
"""

import faulthandler
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

PROCESS_NAME = b"ray::RankProcess"
"""How the command line of a rank begins."""


class Beat(NamedTuple):
    """How far a rank is."""

    num_collectives: int
    """Entered so far. All ranks enter the same ones, so who has entered fewer is behind."""
    micro_batch: tuple[int, int] | None
    """The one it works on, or worked on last, and how many its call has; None before the first."""
    num_waiting: int = 0
    """Engines on its device that wait for weights."""


def count_collectives() -> int:
    if not dist.is_initialized():
        return 0
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def dump_stacks() -> str:
    """Return the Python stacks of all threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def describe_process(pid: int) -> str:
    """Return the state of a rank's process as the kernel says it; empty if this Pod has no such process."""
    folder = Path("/proc", str(pid))
    try:
        if not (folder / "cmdline").read_bytes().startswith(PROCESS_NAME):
            return ""
        lines = (folder / "status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "")
