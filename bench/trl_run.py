"""TRL's GRPOTrainer on the quickstart's model, prompts and reward, for the benchmarks that compare it with `rljob run`.

Group size, prompts per step, token limit, optimizer and dtype are the job's: fp32 master weights, and bf16 compute if
the CPUs have its instructions. Runs as a program of its own, since it takes the memory and the threads of a trainer:

    python bench/trl_run.py RESULT.json --steps 6 --learning-rate 3e-5 --seed 0 --evaluate-every 0
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from rljob_cli.commands import has_bfloat16

EXAMPLE = Path(__file__).parents[1] / "examples/quickstart"
MAX_TOKENS = 12


def run_trl(folder: Path, **settings: float) -> dict[str, Any]:
    """Run this file in a separate process. Return `step_seconds` and `tokens` of each step, and `accuracy`: pairs of
    finished steps and the share of held-out prompts that the greedy answers solve.

    `settings`: steps, learning_rate, seed, evaluate_every (0: never).
    """
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "trl.json"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    subprocess.run([sys.executable, __file__, result, *options], check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def train(arguments: argparse.Namespace) -> None:
    """Train with GRPOTrainer and in-process generation, its only kind on CPUs."""
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    job = yaml.safe_load((EXAMPLE / "rljob.yaml").read_text())["spec"]
    model = str((EXAMPLE / job["model"]["source"]).resolve())
    template, group_size = job["data"]["template"], job["algorithm"]["groupSize"]
    num_samples = job["schedule"]["promptsPerStep"] * group_size
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    compute_score = runpy.run_path(str(EXAMPLE / "reward.py"))["compute_score"]
    seconds: list[float] = []
    tokens: list[int] = []
    accuracy: list[tuple[int, float]] = []

    def score(ids: list[int], text: str, truth: str) -> dict[str, float]:
        found: dict[str, float] = compute_score("sums", text, truth, {"truncated": ids[-1] != tokenizer.eos_token_id})
        return found

    def reward(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [score(*sample)["score"] for sample in zip(completion_ids, completions, answer, strict=True)]

    def read(name: str) -> Any:
        rows = load_dataset("json", data_files=str(EXAMPLE / f"data/{name}.jsonl"), split="train")
        return rows.map(lambda row: {"prompt": template.format(**row)})

    held_out, every = read("eval"), arguments.evaluate_every

    def evaluate(network: Any, step: int) -> None:
        inputs = tokenizer([*held_out["prompt"]], return_tensors="pt", padding=True)
        network.eval()
        with torch.no_grad():
            found = network.generate(
                **inputs, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        network.train()
        num_right = 0.0
        for ids, truth in zip(found[:, inputs["input_ids"].shape[1] :].tolist(), held_out["answer"], strict=True):
            if tokenizer.eos_token_id in ids:
                ids = ids[: ids.index(tokenizer.eos_token_id) + 1]
            num_right += score(ids, tokenizer.decode(ids, skip_special_tokens=True), truth)["exact"]
        accuracy.append((step, num_right / len(held_out)))

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            if every:
                evaluate(model, 0)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started_at = time.monotonic()

        def on_step_end(self, _: Any, state: Any, *__: Any, model: Any, **___: Any) -> None:
            seconds.append(time.monotonic() - self.started_at)
            if every and state.global_step % every == 0:
                evaluate(model, state.global_step)

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=read("train"),
        processing_class=tokenizer,
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=str(arguments.result.parent / "trl"), max_steps=arguments.steps, seed=arguments.seed,
            per_device_train_batch_size=num_samples, num_generations=group_size, max_completion_length=MAX_TOKENS,
            learning_rate=arguments.learning_rate, lr_scheduler_type="constant", max_grad_norm=1.0, beta=0.0,
            temperature=1.0, bf16=has_bfloat16(), use_cpu=True, model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False, save_strategy="no", report_to="none", logging_steps=arguments.steps,
            disable_tqdm=True,
        ),
    )  # fmt: skip
    trainer.train()
    arguments.result.write_text(json.dumps({"step_seconds": seconds, "tokens": tokens, "accuracy": accuracy}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=1e-9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=0)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
