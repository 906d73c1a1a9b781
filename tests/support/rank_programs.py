"""Programs that run scenarios on FSDP2 ranks, in processes that a fork server forks.

Importing torch and transformers takes longer than most scenarios. The fork server (rank_imports) imports them once for
all programs of a pytest process, and each program forks its ranks.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
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

_DEADLINE_SECONDS = 1200
"""Only failures take this long."""
_IMPORTS = "tests.support.rank_imports"
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "TQDM_DISABLE": "1"}


def run_program(module: str, folder: Path) -> Path:
    """Run `python -m module FOLDER`, which must succeed, and return the folder."""
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder)],
        cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=_DEADLINE_SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run_forked(module: str, folder: Path) -> Path:
    """Run the module's `main(folder)` in a forked process, which must succeed, and return the folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_IMPORTS])
    log = folder / "log"
    process = context.Process(target=_run_main, args=(module, folder, log))
    process.start()
    process.join(_DEADLINE_SECONDS)
    process.kill()  # no effect on one that has ended
    process.join()
    assert process.exitcode == 0, log.read_text()
    return folder


def _run_main(module: str, folder: Path, log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.chdir(ROOT)
    os.environ.update(ENVIRONMENT)
    importlib.import_module(module).main(folder)


def run_on_ranks(
    folder: Path, build_inputs: Callable[[int, Path], None], scenarios: Callable[[int, int, Path], Any]
) -> None:
    """Build the inputs in the folder, and run the scenarios with one rank and with two."""
    fork(build_inputs, folder)
    for num_ranks in (1, 2):
        fork_ranks(folder, num_ranks, scenarios)


def fork(build_inputs: Callable[[int, Path], None], folder: Path) -> None:
    """Build the inputs in another process: torch starts threads, after which this one could not fork."""
    torch.multiprocessing.start_processes(build_inputs, (folder,), 1, start_method="fork")


def fork_ranks(folder: Path, num_ranks: int, scenarios: Callable[..., Any], *arguments: Any) -> None:
    """Run `scenarios(rank, num_ranks, folder, *arguments).run()` on so many ranks."""
    meeting = "-".join(map(str, ("meet", num_ranks, *arguments)))
    torch.multiprocessing.start_processes(
        _run_rank, (num_ranks, folder, meeting, scenarios, arguments), num_ranks, start_method="fork"
    )


def _run_rank(
    rank: int, num_ranks: int, folder: Path, meeting: str, scenarios: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    faulthandler.enable()  # a crash in native code shows what each thread did
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{meeting}", rank=rank, world_size=num_ranks)
    scenarios(rank, num_ranks, folder, *arguments).run()
    dist.destroy_process_group()
