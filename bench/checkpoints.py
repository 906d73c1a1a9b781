"""`make bench-checkpoints`: what the hashes of a checkpoint cost, over the same save and load without them.

One rank saves and loads a state of fp32 tensors by torch's distributed checkpoints, in each round without and with
hashes, in turns first. Figures are medians over rounds, also of the quotients: a disk's speed changes within a run.

    save     all bytes on the disk. With hashes, they are hashed while they are written
    load     from the page cache, where a rank that has just verified the file finds it
    verify   the read before a load that compares the hashes

/dev/shm stands for a disk that is as fast as memory: the hashes then cost most. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rljob_trainer.policy.checkpoint_storage import CheckpointWriter, build_reader
from rljob_trainer.run_folder.file_facts import verify_files

GIGABYTE = 10**9
TENSOR_ELEMENTS = 896 * 4864
"""The largest matrices of a layer of Qwen2.5-0.5B."""
MAX_SHARE = 0.10


def build_state(num_bytes: float) -> dict[str, torch.Tensor]:
    count = max(1, round(num_bytes / 4 / TENSOR_ELEMENTS))
    return {f"layers.{index}.weight": torch.randn(TENSOR_ELEMENTS) for index in range(count)}


def measure(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure_round(state: dict[str, torch.Tensor], folder: Path, *, hashed_first: bool) -> Iterator[tuple[str, float]]:
    """Yield figures in seconds by name."""
    for is_hashed in (hashed_first, not hashed_first):
        shutil.rmtree(folder, ignore_errors=True)
        writer = CheckpointWriter(folder) if is_hashed else FileSystemWriter(folder)
        yield "save with hashes" if is_hashed else "save", measure(lambda: save(state, storage_writer=writer))  # noqa: B023
        if isinstance(writer, CheckpointWriter):
            files = writer.files
            yield "verify", measure(lambda: verify_files(folder, files, files))  # noqa: B023
            yield "load", measure(lambda: load(dict(state), storage_reader=build_reader(folder)))


def run(folder: Path, gigabytes: float, rounds: int) -> dict[str, float]:
    """Return figures in seconds, and `save_share` and `load_share`: what the hashes add to both."""
    state, figures = build_state(gigabytes * GIGABYTE), dict[str, list[float]]()
    for index in range(rounds + 1):
        for name, seconds in measure_round(state, folder / "checkpoint", hashed_first=index % 2 == 0):
            if index:  # the first round allocates
                figures.setdefault(name, []).append(seconds)
    shutil.rmtree(folder / "checkpoint")
    quotients = {
        "save_share": [h / s - 1 for h, s in zip(figures["save with hashes"], figures["save"], strict=True)],
        "load_share": [v / s for v, s in zip(figures["verify"], figures["load"], strict=True)],
    }
    return {name: statistics.median(values) for name, values in (figures | quotients).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    results, table = {}, Table(title=f"{options.gigabytes:g} GB, one rank, medians of {options.rounds} rounds")
    for heading in ("on", "save", "with hashes", "more", "load", "verify", "more"):
        table.add_column(heading)
    for parent in (options.folder, Path("/dev/shm")):
        with tempfile.TemporaryDirectory(dir=parent, prefix="rljob-bench-") as folder:
            found = run(Path(folder), options.gigabytes, options.rounds)
        results[str(parent)] = found
        seconds = [f"{found[name]:.3f} s" for name in ("save", "save with hashes", "load", "verify")]
        more = [f"{100 * found[name]:+.1f} %" for name in ("save_share", "load_share")]
        table.add_row(str(parent), *seconds[:2], more[0], *seconds[2:], more[1])
    Console().print(table)
    dist.destroy_process_group()
    print(json.dumps(results | {"holds": results[str(options.folder)]["save_share"] <= MAX_SHARE}))


if __name__ == "__main__":
    main()
