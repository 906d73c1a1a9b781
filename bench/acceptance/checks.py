"""The checks of `make accept-gpu`, in order: commands, their limit, and what must hold. Pure.

Invariant: the limits of all checks add up to at most 40 minutes, and a check that needs a GPU has no form for CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from acceptance import judgements
from acceptance.judgements import Judgement

ROOT = Path(__file__).resolve().parents[2]
MAX_MINUTES = 40
_PYTHON = sys.executable
_RLJOB = str(Path(sys.executable).with_name("rljob"))
_SHARED = "examples/shared/rljob.yaml"
_QUICKSTART = "examples/quickstart/rljob.yaml"
_ATTENTION = "rljob_trainer/policy/test_attention.py"
_QUICKSTART_STEPS = 18
_CPU_FACTOR = 1.8
"""Multiplies the limits without a GPU: machines that run tests are busy."""
_TINY = ("--model", "tiny", "--dtype", "float32", "--num-rows", "4", "--answer-tokens", "16", "--updates", "1")
_OFFLOADS = ("none", "reference", "all")


@dataclass(frozen=True)
class Check:
    name: str
    commands: tuple[tuple[str, ...], ...]
    """Programs with their arguments, one after the other. None: it reads what an earlier check has left."""
    seconds: int
    """Limit of all commands."""
    judge: Judgement
    needs_gpu: bool = False
    after: str | None = None
    """A check without which it has nothing to read."""


def build_checks(has_gpu: bool, runs: Path) -> list[Check]:
    """Return the checks. `has_gpu`: false for the reduced form. `runs`: folder for the runs of jobs."""
    number = int(has_gpu)
    on_device = {"trainer.gpusPerReplica": number, "rollout.gpusPerReplica": number}
    on_one = on_device | {"trainer.replicas": 1, "rollout.placement": "trainer", "rollout.weightTransfer": "device"}

    def run(job: str, folder: str, fields: dict[str, object], *options: str) -> tuple[str, ...]:
        settings = [part for path, value in fields.items() for part in ("--set", f"spec.{path}={value}")]
        return (_RLJOB, "run", job, "--dir", str(runs / folder), "--output", "plain", *options, *settings)

    def bench(name: str, *options: str) -> tuple[str, ...]:
        return (_PYTHON, f"bench/{name}.py", *options)

    tests = [f"tests/unit/{_ATTENTION}", *([f"tests/process/{_ATTENTION}"] if has_gpu else [])]
    shared, job = runs / "shared/shared", runs / "job/quickstart"
    offload = on_device | {"algorithm.kl.coefficient": 0.001, "schedule.steps": 1}
    # Short answers to many prompts in one micro-batch: hundreds of GiB of activations.
    too_large = {
        "trainer.microBatchTokens": 10_000_000,
        "trainer.gradientCheckpointing": "none",
        "schedule.promptsPerStep": 1024,
        "algorithm.groupSize": 16,
        "evaluation.everySteps": 0,
    }
    checks = [
        Check("doctor", ((_PYTHON, "-m", "rljob_trainer.doctor"),), 120, judgements.succeed),
        Check("kernels", ((_PYTHON, "-m", "pytest", "-q", *tests),), 300, judgements.succeed),
        Check(
            "shared device, float32",
            (run(_SHARED, "shared", on_device | {"schedule.steps": 2}, "--fresh"),),
            240,
            judgements.check_run(shared, 2, "float32"),
        ),
        Check(
            "resume",
            (
                run(_SHARED, "resumed", on_device | {"schedule.steps": 2}, "--fresh"),
                run(_SHARED, "resumed", on_device | {"schedule.steps": 4}),
            ),
            300,
            judgements.check_resume(runs / "resumed/shared", 2, 4),
        ),
        Check("digest", (), 0, judgements.check_digests(shared), after="shared device, float32"),
        Check(
            "demo on a shared GPU",
            (run(_QUICKSTART, "job", on_one, "--fresh"),),
            420,
            judgements.check_learning(job, _QUICKSTART_STEPS, "bfloat16"),
            needs_gpu=True,
        ),
        Check(
            "offloads",
            tuple(run(_SHARED, value, offload | {"trainer.offload": value}, "--fresh") for value in _OFFLOADS),
            420,
            judgements.check_norms([runs / value / "shared" for value in _OFFLOADS]),
            needs_gpu=True,
        ),
        Check(
            "out of memory",
            (run(_QUICKSTART, "memory", on_one | too_large, "--fresh"),),
            300,
            judgements.check_out_of_memory,
            needs_gpu=True,
        ),
        Check(
            "bench-policy",
            (bench("policy", *(() if has_gpu else _TINY)),),
            180,
            judgements.check_policy,
        ),
        Check(
            "bench-weights",
            (bench("weights", "--gigabytes", "1.0" if has_gpu else "0.1", "--versions", "2", "--transfer", "local"),),
            120,
            judgements.check_weights,
        ),
    ]
    if has_gpu:
        return checks
    factors = ((check, 0 if check.needs_gpu else _CPU_FACTOR) for check in checks)
    return [replace(check, seconds=round(check.seconds * factor)) for check, factor in factors]


def total_seconds(checks: Sequence[Check]) -> int:
    return sum(check.seconds for check in checks)
