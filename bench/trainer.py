"""Samples per second of the quickstart's model: `rljob run`, then TRL's GRPOTrainer.

Both use the same model, prompts, reward, group size, prompts per step, token limit, cores and dtype: fp32 master
weights, and bf16 compute if the CPUs have its instructions, which `rljob run` decides, else fp32. The learning rate is
almost 0, so that the length of completions does not change. The first step is excluded (warm-up). A step lasts from its
first prompt until the new weights are served. Last line: one JSON object with `ratio`, RLJob's rate over TRL's.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from run_job import read_steps, run_job

from rljob_cli.commands import has_bfloat16

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/quickstart"
LEARNING_RATE = 1e-9
MAX_TOKENS = 12


def run_ours(steps: int, folder: Path) -> dict[str, Any]:
    """Run the quickstart, and return the metrics of all steps except the first."""
    overrides = {
        "schedule.steps": steps,
        "data.eval": "null",
        "algorithm.optimizer.learningRate": LEARNING_RATE,
        "checkpoint.everySteps": steps,
        "checkpoint.exportPolicy": "never",
        "rollout.sampling.maxTokens": MAX_TOKENS,
    }
    measured = read_steps(run_job(EXAMPLE / "rljob.yaml", folder, overrides))[1:]  # the first one warms up
    phases = sorted({name for record in measured for name in record.phase_seconds})
    return {
        "step_seconds": [record.step_seconds for record in measured],
        "tokens": [record.num_tokens for record in measured],
        "phase_seconds": {
            name: statistics.mean(record.phase_seconds.get(name, 0.0) for record in measured) for name in phases
        },
    }


def run_trl(steps: int, folder: Path) -> dict[str, Any]:
    """Run TRL in a separate process: this file with --trl."""
    result = folder / "trl.json"
    subprocess.run([sys.executable, __file__, "--steps", str(steps), "--trl", result], check=True)
    return json.loads(result.read_text())


def train_with_trl(steps: int, result: Path) -> None:
    """Train with GRPOTrainer and in-process generation, its only kind on CPUs."""
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    job = yaml.safe_load((EXAMPLE / "rljob.yaml").read_text())["spec"]
    model = str((EXAMPLE / job["model"]["source"]).resolve())
    template, group_size = job["data"]["template"], job["algorithm"]["groupSize"]
    num_samples = job["schedule"]["promptsPerStep"] * group_size
    tokenizer = AutoTokenizer.from_pretrained(model)
    compute_score = runpy.run_path(str(EXAMPLE / "reward.py"))["compute_score"]
    seconds: list[float] = []
    tokens: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        ended = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        return [
            compute_score("sums", text, truth, {"truncated": not end})["score"]
            for text, truth, end in zip(completions, answer, ended, strict=True)
        ]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started_at = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.monotonic() - self.started_at)

    rows = load_dataset("json", data_files=str(EXAMPLE / "data/train.jsonl"), split="train")
    rows = rows.map(lambda row: {"prompt": template.format(**row)})
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=str(result.parent / "trl"), max_steps=steps, per_device_train_batch_size=num_samples,
            num_generations=group_size, max_completion_length=MAX_TOKENS, learning_rate=LEARNING_RATE, beta=0.0,
            temperature=1.0, bf16=has_bfloat16(), use_cpu=True, model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False, save_strategy="no", report_to="none", logging_steps=steps, disable_tqdm=True,
        ),
    )  # fmt: skip
    trainer.train()
    result.write_text(json.dumps({"step_seconds": seconds[1:], "tokens": tokens[1:]}))


def report(ours: dict[str, Any], trl: dict[str, Any], num_samples: int) -> dict[str, float]:
    """Print the tables, and return the results."""
    step, other = statistics.mean(ours["step_seconds"]), statistics.mean(trl["step_seconds"])
    console = Console()
    table = Table("", "s per step", "samples/s", "tokens per step", title=f"{num_samples} samples per step")
    for name, mean, tokens in (("rljob", step, ours["tokens"]), ("TRL", other, trl["tokens"])):
        table.add_row(name, f"{mean:.2f}", f"{num_samples / mean:.2f}", f"{statistics.mean(tokens):.0f}")
    console.print(table)
    phases = Table("phase", "s per step", "share", title="RLJob's time by phase")
    for name, seconds in sorted(ours["phase_seconds"].items(), key=lambda item: -item[1]):
        phases.add_row(name, f"{seconds:.2f}", f"{seconds / step:.0%}")
    rest = step - sum(ours["phase_seconds"].values())
    phases.add_row("(rest)", f"{rest:.2f}", f"{rest / step:.0%}")
    console.print(phases)
    return {
        "ratio": round(other / step, 3),
        "samples_per_second": round(num_samples / step, 3),
        "trl_samples_per_second": round(num_samples / other, 3),
        **{f"{name}_seconds": round(seconds, 3) for name, seconds in ours["phase_seconds"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="steps of both runs; the first one is not counted")
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments.trl:
        train_with_trl(arguments.steps, arguments.trl)
        return
    job = yaml.safe_load((EXAMPLE / "rljob.yaml").read_text())["spec"]
    num_samples = job["schedule"]["promptsPerStep"] * job["algorithm"]["groupSize"]
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as scratch:
        ours = run_ours(arguments.steps, Path(scratch))
        trl = run_trl(arguments.steps, Path(scratch))
    print(json.dumps(report(ours, trl, num_samples)))


if __name__ == "__main__":
    main()
