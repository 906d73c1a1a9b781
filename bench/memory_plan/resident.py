"""The resident memory of a real trainer rank on CPUs, against the plan of a Pod with one rank."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from memory_plan.cases import SMOLLM2_135M, Case
from rljob_inputs.memory import roles
from rljob_inputs.memory.limits import ShardingMode
from rljob_inputs.memory.trainer import plan_rank

_GIB = 2**30
_WHOLE = ShardingMode(keep_gathered=True, reduce_once=True)
RESIDENT_CASES = (
    Case("0.135B, 256 tokens", SMOLLM2_135M, 1, 1, 256, _WHOLE, on_gpu=False),
    Case("0.135B, 1k tokens, LoRA", SMOLLM2_135M, 1, 4, 256, _WHOLE, lora_rank=32, on_gpu=False),
    Case("0.135B, 4k tokens, LoRA, checkpointing", SMOLLM2_135M, 1, 8, 512, _WHOLE, "full", lora_rank=32, on_gpu=False),
)


def measure_resident(console: Console) -> list[dict[str, Any]]:
    """Run each case in a process, and return the peaks."""
    table = Table("one rank on CPUs", "process, GiB", "planned, GiB", "error", title="peak of resident memory")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        _write_model(folder)
        for index, case in enumerate(RESIDENT_CASES):
            peak = _run_process(index, folder)
            plan = roles.PROCESS_BYTES + plan_rank(case.build_work())[0].num_bytes
            error = abs(plan - peak) / peak
            found.append({"case": case.name, "process": peak, "planned": plan, "error": error})
            table.add_row(case.name, f"{peak / _GIB:.2f}", f"{plan / _GIB:.2f}", f"{100 * error:.1f}%")
    console.print(table)
    return found


def _write_model(folder: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SMOLLM2_135M)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def _run_process(index: int, folder: str) -> int:
    command = [sys.executable, "-m", "memory_plan.resident", str(index), folder]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def run_rank(case: Case, model: str) -> int:
    """Run two updates of two calls with two micro-batches each. Return the peak of this process in bytes."""
    import ray  # noqa: F401 - a rank has it
    import torch
    import torch.distributed as dist

    from memory_plan.tracker import build_batch
    from rljob_trainer.policy.policy import Policy
    from rljob_trainer.weights.heap import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{model}/rendezvous-{os.getpid()}", rank=0, world_size=1)
    rank = Policy(case.build_job(), model, torch.device("cpu"))
    for _ in range(2):
        for _ in range(2):
            rank.accumulate([build_batch(case)] * 2)
        rank.apply(float(4 * case.lines * case.length))
    dist.destroy_process_group()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    print(json.dumps({"peak_bytes": run_rank(RESIDENT_CASES[int(sys.argv[1])], sys.argv[2])}))
