"""The steps of `make accept-gpu`, in the order of what they would teach: commands, their limit, what must hold. Pure.

Invariant: a step needs nothing of another one, takes at most eight minutes, and has runs in a folder of its own. A step
that needs a GPU has no form for CPUs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from acceptance import judgements
from acceptance.judgements import Judgement, both

ROOT = Path(__file__).resolve().parents[2]
MAX_SECONDS = 480
_PYTHON = sys.executable
_RLJOB = str(Path(sys.executable).with_name("rljob"))
_SHARED = "examples/shared/rljob.yaml"
_SHARED_REWARD = "examples/shared-reward/rljob.yaml"
_QUICKSTART = "examples/quickstart/rljob.yaml"
_ATTENTION = "rljob_trainer/policy/test_attention.py"
_QUICKSTART_STEPS = 18
_CPU_FACTOR = 1.8
"""Multiplies the limits without a GPU: machines that run tests are busy."""
_TINY = ("--model", "tiny", "--dtype", "float32", "--num-rows", "4", "--answer-tokens", "16", "--updates", "1")
_OFFLOADS = ("none", "reference", "all")
_MIN_SHARE_OF_PEAK = 0.12
"""What updates of 0.5B need on a GPU. An H100 had 0.17."""
_MAX_COPIES = 40
"""Memory copies that weights may take to a receiver on this machine."""


@dataclass(frozen=True)
class Check:
    name: str
    """Without spaces: a word of ONLY=, and the name of its files."""
    teaches: str
    commands: tuple[tuple[str, ...], ...]
    """Programs with their arguments, one after the other."""
    seconds: int
    """Limit of all commands."""
    judge: Judgement
    needs_gpu: bool = False


def build_checks(has_gpu: bool, runs: Path) -> list[Check]:
    """Return the steps. `has_gpu`: false for the reduced form. `runs`: folder for the runs of jobs."""
    number = int(has_gpu)
    on_device: dict[str, object] = {"trainer.gpusPerReplica": number, "rollout.gpusPerReplica": number}
    on_one = on_device | {"trainer.replicas": 1, "rollout.placement": "trainer"}
    two_steps = on_device | {"schedule.steps": 2}

    def run(job: str, folder: str, fields: dict[str, object], *options: str) -> tuple[str, ...]:
        settings = [part for path, value in fields.items() for part in ("--set", f"spec.{path}={value}")]
        return (_RLJOB, "run", job, "--dir", str(runs / folder), "--output", "plain", *options, *settings)

    def bench(name: str, *options: str) -> tuple[str, ...]:
        return (_PYTHON, f"bench/{name}.py", *options)

    def engine(*options: str) -> tuple[str, ...]:
        return bench("accept_engine", *(["--gpu"] if has_gpu else []), *options)

    def shared(folder: str, steps: int) -> Judgement:
        found = runs / folder / "shared"
        return both(judgements.check_run(found, steps, "float32"), judgements.check_digests(found))

    tests = [f"tests/unit/{_ATTENTION}", *([f"tests/process/{_ATTENTION}"] if has_gpu else [])]
    turns, demo, reward = runs / "turns/shared", runs / "demo/quickstart", runs / "two-engines/shared-reward"
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
        Check(
            "doctor",
            "does the GPU compute, and is the build right?",
            ((_PYTHON, "-m", "rljob_trainer.doctor"),),
            120,
            judgements.succeed,
        ),
        Check(
            "kernels",
            "packed attention on the GPU has the log-probs and gradients of rows alone",
            ((_PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests),),
            300,
            judgements.succeed,
        ),
        Check(
            "first-sync",
            "vLLM loads two versions, with their digests, and samples from them; sleeps, and wakes with another one",
            (engine(),),
            480,
            judgements.check_engine,
        ),
        Check(
            "turns",
            "a job whose trainer and rollouts take turns, resumed once; both sides agree about log-probs and weights",
            (run(_SHARED, "turns", two_steps, "--fresh"), run(_SHARED, "turns", on_device | {"schedule.steps": 4})),
            480,
            both(judgements.check_resume(turns, 2, 4), shared("turns", 4)),
        ),
        Check(
            "demo",
            "make demo's job in bfloat16 on one GPU: the held-out accuracy rises",
            (run(_QUICKSTART, "demo", on_one, "--fresh"),),
            480,
            judgements.check_learning(demo, _QUICKSTART_STEPS, "bfloat16"),
            needs_gpu=True,
        ),
        Check(
            "lora",
            "vLLM serves two adapters of a model, and keeps its weights asleep",
            (engine("--adapter"),),
            480,
            judgements.check_engine,
        ),
        Check(
            "lora-turns",
            "a job that publishes adapters, in turns",
            (run(_SHARED, "lora-turns", two_steps | {"trainer.lora": "{rank: 8, publish: adapter}"}, "--fresh"),),
            300,
            shared("lora-turns", 2),
            needs_gpu=True,
        ),
        Check(
            "bench-policy",
            "tokens per second of the trainer's updates, and their share of the peak",
            (bench("policy", *(() if has_gpu else _TINY)),),
            240,
            judgements.check_policy(_MIN_SHARE_OF_PEAK if has_gpu else 0.0),
        ),
        Check(
            "bench-weights",
            "weights reach a receiver; the time in memory copies",
            (bench("weights", "--gigabytes", "1.0" if has_gpu else "0.1", "--versions", "2", "--transfer", "local"),),
            120,
            judgements.check_weights(_MAX_COPIES),
        ),
        Check(
            "two-engines",
            "a reward model's engine takes turns on the same GPU",
            (run(_SHARED_REWARD, "two-engines", two_steps | {"rewards[1].model.gpusPerReplica": 1}, "--fresh"),),
            480,
            judgements.check_run(reward, 2, "float32"),
            needs_gpu=True,
        ),
        Check(
            "mixture",
            "vLLM loads a mixture of experts, whose kernels have a layout of their own",
            (engine("--model", "mixture"),),
            480,
            judgements.check_engine,
        ),
        Check(
            "mixture-lora",
            "vLLM serves an adapter of a mixture of experts",
            (engine("--model", "mixture", "--adapter"),),
            480,
            judgements.check_engine,
            needs_gpu=True,
        ),
        Check(
            "cuda-ipc",
            "a rank hands its weights to the engine on its GPU (rollout.weightTransfer: device)",
            (run(_SHARED, "cuda-ipc", two_steps | {"rollout.weightTransfer": "device"}, "--fresh"),),
            300,
            shared("cuda-ipc", 2),
            needs_gpu=True,
        ),
        Check(
            "offloads",
            "the first gradient norms with offload: none, reference and all agree within 5%",
            tuple(run(_SHARED, value, offload | {"trainer.offload": value}, "--fresh") for value in _OFFLOADS),
            480,
            judgements.check_norms([runs / value / "shared" for value in _OFFLOADS]),
            needs_gpu=True,
        ),
        Check(
            "out-of-memory",
            "a micro-batch that is too large ends the job with an error that names trainer.microBatchTokens",
            (run(_QUICKSTART, "memory", on_one | too_large, "--fresh"),),
            300,
            judgements.check_out_of_memory,
            needs_gpu=True,
        ),
    ]
    if has_gpu:
        return checks
    return [replace(check, seconds=0 if check.needs_gpu else round(check.seconds * _CPU_FACTOR)) for check in checks]
