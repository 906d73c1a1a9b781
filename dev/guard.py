"""Compare three updates of the tiny job, bit by bit, before and after a change of the code.

    python dev/guard.py --record FILE [--tree DIR]      writes what the updates of DIR were
    python dev/guard.py --against FILE [--tree DIR]     fails if those of DIR are others

`make guard RECORD=FILE`, `make guard AGAINST=FILE`. DIR is a checkout with its own .venv; the default is the one of
this file, which may be a copy from another commit. A case per spec.schedule.type:

    synchronous                      `rljob run` of examples/tiny: vLLM, ranks and reward servers
    onPolicy, oneStepOff, bounded    the driver of tests/support/driver_harness.py with a real trainer group, on Ray
                                     and gloo; a double gives answers, and scores in the order of the groups

Compared are the tokens, log-probs, versions, scores and advantages of each sample, the numbers of each update, and the
digests of the weights after it. Seeds are fixed, each process has one thread, and vLLM computes one sequence at a time:
no sum depends on how busy the machine is. Numbers depend on CPU and libraries, so record and compare on one machine.
Metrics and trajectories are read as the files that users read, and not by the types of the tree.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS, PROMPTS, SAMPLES = 3, 4, 4
"""Updates; groups of an update; samples of a group."""
SCHEDULES: dict[str, int] = {"onPolicy": 0, "oneStepOff": 1, "bounded": 2}
"""Cases with a double -> steps from a group's start to its update."""
CASES = ("synchronous", *SCHEDULES)
_TRAINED = 1
"""First token of the prompts that the double knows as those of training."""
_MODEL = ".models/tiny-qwen3"
_METRICS = (
    "step", "prompts", "num_samples", "num_invalid", "reward", "reward_std", "loss", "policy_loss", "kl", "entropy",
    "grad_norm", "learning_rate", "clip_fraction", "logprob_difference", "num_tokens", "staleness_mean",
    "staleness_max", "weight_version", "weight_digest",
)  # fmt: skip
_COLUMNS = (
    "step", "group", "sample", "prompt_index", "completion", "token_ids", "logprobs", "versions", "score", "advantage",
    "update", "part", "position",
)  # fmt: skip
_TOKEN = "0123456789abcdef0123456789abcdef"
_DEADLINE_SECONDS = 600


def record(tree: Path, cases: list[str]) -> dict[str, Any]:
    """Run the cases in processes of the tree, each in a new folder. Return case -> what it was."""
    python = tree / ".venv/bin/python"
    if not python.exists():
        raise SystemExit(f"{python}: not found; run make install in {tree}")
    if not (tree / _MODEL).exists():
        subprocess.run([python, "examples/prepare.py", "tiny"], cwd=tree, check=True)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    env = {**os.environ, **threads, "PATH": path, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    found = {}
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="guard-") as folder:
            command = [python, Path(__file__).resolve(), "--case", case, "--folder", folder]
            done = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if done.returncode:
                raise SystemExit(f"{case}: failed\n{done.stdout.decode(errors='replace')[-8000:]}")
            found[case] = json.loads((Path(folder) / "found.json").read_text())
        print(f"{case}: {describe(found[case])}", flush=True)
    return found


def describe(case: dict[str, Any]) -> str:
    losses = " ".join(f"{step['loss']:.6g}" for step in case["steps"])
    return f"{len(case['samples'])} samples, losses {losses}, weights {case['steps'][-1]['weight_digest'][:12]}"


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what differs, as the path of the first difference of each case."""
    return [f"{case}{found}" for case in after if (found := _find_difference(before[case], after[case]))]


def _find_difference(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        parts: list[tuple[str, Any, Any]] = [(f".{key}", before[key], after[key]) for key in before]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        parts = [(f"[{index}]", *pair) for index, pair in enumerate(zip(before, after, strict=True))]
    else:
        return "" if before == after else f": expected {before!r}, got {after!r}"
    return next((f"{name}{found}" for name, old, new in parts if (found := _find_difference(old, new))), "")


def read_run(run: Path) -> dict[str, Any]:
    """Return what metrics.jsonl, the trajectories and the export of a run's folder say of its updates."""
    import pyarrow.parquet as pq

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [{name: line[name] for name in _METRICS if name in line} for line in lines if line["type"] == "step"]
    files = sorted((run / "trajectories").rglob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist() if row["lane"] == "train"]
    samples = [{name: row[name] for name in _COLUMNS} for row in rows]
    samples.sort(key=lambda row: (row["step"], row["group"], row["sample"]))
    assert (len(steps), len(samples)) == (STEPS, STEPS * PROMPTS * SAMPLES)
    assert all(step["weight_digest"] and step["loss"] for step in steps), "each update changes the weights"
    weights = {file.name: _hash_file(file) for file in sorted((run / "export").rglob("*.safetensors"))}
    assert weights, "the run wrote no weights"
    return {"steps": steps, "samples": samples, "export": weights}


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_synchronous(folder: Path) -> Path:
    """`rljob run` of the tiny job, to its end. Return the run's folder."""
    settings = {
        "schedule.type": "synchronous",
        "schedule.steps": STEPS,
        "schedule.promptsPerStep": PROMPTS,
        "algorithm.groupSize": SAMPLES,
        "rollout.extraArgs": '["--max-num-seqs=1"]',
    }
    command = ["rljob", "run", "examples/tiny/rljob.yaml", "--dir", str(folder), "--output", "plain"]
    for name, value in settings.items():
        command += ["--set", f"spec.{name}={value}"]
    subprocess.run(command, check=True, timeout=_DEADLINE_SECONDS)
    return folder / "tiny"


def start_worker(env: dict[str, str], address: str) -> subprocess.Popen[bytes]:
    """Start a trainer Pod's program on a loopback address."""
    command = [sys.executable, "-m", "rljob_trainer.worker"]
    return subprocess.Popen(command, env={**env, "RLJOB_POD_IP": address})


async def run_with_double(folder: Path, schedule: str) -> Path:
    """A driver with a real trainer group, whose rollouts and rewards are doubles. Return the run's folder."""
    import pytest
    from aiohttp import web

    from rljob_inputs.data.prompts import PromptSet
    from rljob_inputs.prompts import Prompt
    from rljob_trainer.feed.prompt_feed import PromptSource
    from rljob_trainer.ranks.group import TrainerGroup
    from rljob_trainer.ranks.ray_head import RayHead
    from rljob_trainer.run_folder.server import RunFileServer
    from tests.support import driver_fakes, driver_harness

    network = f"127.{60 + os.getpid() // 200 % 30}.{1 + os.getpid() % 200}"
    head, pods = f"{network}.1", (f"{network}.2", f"{network}.3")
    model, staleness = os.path.join(os.getcwd(), _MODEL), SCHEDULES[schedule]
    changed = asyncio.Condition()
    num_trained, num_scored, last_version = 0, 0, -1

    async def wait_until(condition: Any) -> None:
        async with changed:
            await changed.wait_for(condition)

    class Group:
        """A real trainer group that says which groups have trained, and what is published."""

        def __init__(self, group: Any) -> None:
            self._group = group

        def __getattr__(self, name: str) -> Any:
            return getattr(self._group, name)

        async def accumulate(self, rows: Any, versions: Any) -> None:
            nonlocal num_trained
            await self._group.accumulate(rows, versions)
            async with changed:
                num_trained += len(rows) // SAMPLES
                changed.notify_all()

        async def publish(self, version: int) -> Any:
            nonlocal last_version
            harness.published = await self._group.publish(version)
            async with changed:
                last_version = version
                changed.notify_all()
            return harness.published

        async def export(self, *arguments: Any, **named: Any) -> Any:
            return await self._group.export(*arguments, **{**named, "tokenizer_source": model})

    class Rollout(driver_fakes.FakeRollout):
        """Tokens and log-probs are drawn from the prompt and the seed; their versions follow from the schedule."""

        async def complete(self, request: Any) -> Any:
            body = await request.json()
            row, seed = body["token_ids"][-1] - 3, body["sampling_params"]["seed"]
            draw = random.Random(f"{row}/{seed}")
            count = draw.randrange(8, 17)
            tokens = [draw.randrange(3, 2000) for _ in range(count)]
            step = row // PROMPTS
            first = max(0, step - staleness)
            last = min(first + 1, step) if schedule == "bounded" else first
            if body["token_ids"][0] != _TRAINED:
                first = last = last_version
            await wait_until(lambda: last_version >= last)
            spans = [(first, 0, count // 2), (last, count // 2, count)]
            key = harness.published.key.rpartition(":")[0]
            choice = {
                "text": " ".join(map(str, tokens)),
                "token_ids": tokens,
                "logprobs": {"content": [{"logprob": draw.uniform(-8.5, -6.5)} for _ in tokens]},
                "finish_reason": "stop",
                "weight_versions": [{"version": f"{key}:{v}", "start": start, "end": end} for v, start, end in spans],
            }
            lines = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
            return web.Response(text=lines, content_type="text/event-stream")

    class Reward(driver_fakes.FakeReward):
        """Scores come one at a time, in the order of the groups, and a group's once the one before has trained."""

        async def score(self, request: Any) -> Any:
            nonlocal num_scored
            body = await request.json()
            score = random.Random(body["completion"]).random()
            answer = web.json_response({"id": body["id"], "valid": True, "score": score, "components": {"exact": 1.0}})
            if "/train/" not in body["id"]:
                return answer
            group, sample = int(body["ground_truth"]), int(body["id"].rpartition("/")[2])
            await wait_until(lambda: num_trained >= group and num_scored == group * SAMPLES + sample)
            async with changed:
                num_scored += 1
                changed.notify_all()
            return answer

    job = driver_harness.make_job(
        model={"source": model},
        data={"shuffle": False},
        algorithm={
            "groupSize": SAMPLES,
            "kl": {"coefficient": 0.05},
            "entropyCoefficient": 0.01,
            "optimizer": {"learningRate": 1e-3},
        },
        schedule={"type": schedule, "steps": STEPS, "promptsPerStep": PROMPTS},
        # Each group fills a micro-batch of each rank, so it trains alone, however fast its successors are scored.
        trainer={"replicas": len(pods), "dtype": "float32", "microBatchTokens": 16},
        evaluation={"atStart": False, "everySteps": 100},
    )
    (folder / "job.yaml").write_text(json.dumps(job.to_manifest()))
    (folder / "head").write_text(f"{head} head\n")
    shared = {"RLJOB_HEAD": "head", "RLJOB_HOSTS_FILE": str(folder / "head"), "RLJOB_MODEL": model}
    env = {**os.environ, **shared, "RLJOB_JOB_FILE": str(folder / "job.yaml")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLJOB_POD_IP", head)
        ray_head = RayHead(head)
        workers = [start_worker(env, address) for address in pods]
        try:
            await ray_head.start()
            harness = driver_harness.DriverHarness(folder, patch, job, network=network, num_rollouts=1, num_rewards=1)
            harness.rollouts = [Rollout(harness, harness.rollouts[0].address)]
            harness.rewards = [Reward(harness, harness.rewards[0].address)]
            rows = {i: Prompt(i, f"p{i}", [_TRAINED, 2, 3 + i], ground_truth=str(i)) for i in range(STEPS * PROMPTS)}
            harness.sources = [PromptSource("train", 1.0, PromptSet(len(rows), rows))]
            files = RunFileServer(harness.run_dir, head, _TOKEN)

            async def start_trainer(generation: str, checkpoint: Any, report: Any) -> Group:
                group = await TrainerGroup.start(
                    job, model=model, run=files.folder, generation=generation, checkpoint=checkpoint, report=report
                )
                return Group(group)

            patch.setattr(harness, "start_trainer", start_trainer)
            async with asyncio.timeout(_DEADLINE_SECONDS), harness, harness.driver() as driver:
                await driver.run()
            files.close()
        finally:
            import ray

            ray.shutdown()
            for process in workers:
                process.terminate()
            for process in workers:
                process.wait(60)
            await ray_head.close()
    return harness.run_dir


def run_case(case: str, folder: Path) -> None:
    os.environ["RLJOB_TOKEN"] = _TOKEN
    if case in SCHEDULES:
        from rljob_trainer.ranks.ray_node import ray_environment

        os.environ.update(ray_environment())  # Ray reads it at import
        run = asyncio.run(run_with_double(folder, case))
    else:
        run = run_synchronous(folder)
    (folder / "found.json").write_text(json.dumps(read_run(run)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--against", type=Path, metavar="FILE")
    parser.add_argument("--tree", type=Path, metavar="DIR", default=Path(__file__).resolve().parents[1])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="SCHEDULE")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        run_case(options.case, options.folder)
        return
    if (options.record is None) == (options.against is None):
        parser.error("give --record FILE or --against FILE")
    before = json.loads(options.against.read_text()) if options.against else None
    found = record(options.tree.resolve(), options.only)
    if before is None:
        options.record.write_text(json.dumps(found, indent=1) + "\n")
    elif differences := compare(before, found):
        raise SystemExit("\n".join(["the updates are others than those of the record:", *differences]))
    else:
        print(f"bit-equal: {', '.join(found)}")


if __name__ == "__main__":
    main()
