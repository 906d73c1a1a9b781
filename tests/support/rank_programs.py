"""Programs that run scenarios on FSDP2 ranks: one start of the processes for all, since importing torch takes long."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.paths import ROOT

_DEADLINE_SECONDS = 400


def run_program(module: str, folder: Path) -> Path:
    """Run `python -m module FOLDER`, which must succeed, and return the folder."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run_on_ranks(build_inputs: Callable[[int, Path], None], scenarios: Callable[[int, int, Path], Any]) -> None:
    """The program: build the inputs in the folder of the command line, and run the scenarios with one rank and two."""
    folder = Path(sys.argv[1])
    # Fork before torch starts a thread: the imports, which take most of the time, run once.
    torch.multiprocessing.start_processes(build_inputs, (folder,), 1, start_method="fork")
    for num_ranks in (1, 2):
        fork_ranks(folder, num_ranks, scenarios)


def fork_ranks(folder: Path, num_ranks: int, scenarios: Callable[..., Any], *arguments: Any) -> None:
    """Run `scenarios(rank, num_ranks, folder, *arguments).run()` on so many ranks."""
    meeting = "-".join(map(str, ("meet", num_ranks, *arguments)))
    torch.multiprocessing.start_processes(
        _run_rank, (num_ranks, folder, meeting, scenarios, arguments), num_ranks, start_method="fork"
    )


def _run_rank(
    rank: int, num_ranks: int, folder: Path, meeting: str, scenarios: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{meeting}", rank=rank, world_size=num_ranks)
    scenarios(rank, num_ranks, folder, *arguments).run()
    dist.destroy_process_group()
