"""What does a teacher bring, and what does it cost? The sums of the quickstart, with the demo's export as teacher.

    distill        the job of examples/distill: reverse KL of each sampled token
    cross-entropy  the same number of the teacher's own samples, given to data.warmStart
    self           the policy after a hint with the right answer is its own teacher
    RL             the quickstart: its reward, for three times as many steps
    warm start     examples/quickstart/warm-start.yaml: given answers, then RL for half of the quickstart's steps

Each trains on the same number of samples for each step, from the same base. Held-out accuracy is that of greedy
answers; intervals are Student's, of the mean over seeds. Tokens/s are those of the steps after the first one, over
those of RL on the same seed. Draws docs/images/distill-learning.png; last line: one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from against_trl import Point, average, draw, interval
from rich.console import Console
from run_job import QUICKSTART, measure_job

from rljob_api.run.metrics import StepRecord

ROOT = Path(__file__).parents[1]
JOB = ROOT / "examples/distill/rljob.yaml"
NAMES = ("distill", "cross-entropy", "self", "RL", "warm start")
HINT = "Question: {question}\nAnswer: {answer}\n\n"


def build_spec(name: str, folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """Return the spec of a variant, with absolute paths."""
    if name in ("RL", "warm start"):
        path = QUICKSTART if name == "RL" else QUICKSTART.with_name("warm-start.yaml")
        spec = yaml.safe_load(path.read_text())["spec"]
        spec["schedule"]["seed"] = seed
        if name == "RL":
            spec["schedule"]["steps"] = 3 * steps
        return finish(spec, 3)
    spec = yaml.safe_load(JOB.read_text())["spec"]
    num_samples = spec["schedule"]["promptsPerStep"] * spec["algorithm"]["groupSize"]
    teacher, correct = spec["rewards"]
    if name == "self":
        spec["rewards"] = [{"name": "hinted", "use": "training", "teacher": {"hint": HINT}}, correct]
    elif name == "cross-entropy":
        given = folder / "given.jsonl"
        rows = sample(spec, Path(teacher["teacher"]["model"]["source"]).name, seed, steps * num_samples)
        given.write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec["rewards"] = [{**correct, "use": "both"}]
        spec["data"]["warmStart"] = {"source": str(given), "prompt": "question"}
        spec["schedule"] |= {"warmStart": {"steps": steps}, "promptsPerStep": num_samples}
    spec["schedule"] |= {"steps": steps, "seed": seed}
    return finish(spec, 2)


def finish(spec: dict[str, Any], every_steps: int) -> dict[str, Any]:
    """Return the spec with its evaluations, and with absolute paths."""
    spec["evaluation"]["everySteps"] = every_steps
    spec["checkpoint"] = {"everySteps": 100, "exportPolicy": "never"}
    text = json.dumps(spec).replace("../../", f"{ROOT}/").replace("../quickstart", str(QUICKSTART.parent))
    text = text.replace('"./', f'"{QUICKSTART.parent}/').replace('"reward.py"', f'"{QUICKSTART.parent}/reward.py"')
    return json.loads(text)


def sample(spec: dict[str, Any], model: str, seed: int, count: int) -> Iterator[dict[str, str]]:
    """Yield `count` answers of the teacher that ended, at temperature 1, to the prompts in turn."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = ROOT / ".models" / model
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    teacher = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    lines = (QUICKSTART.parent / "data/train.jsonl").read_text().splitlines()
    questions = itertools.cycle(json.loads(line)["question"] for line in lines)
    torch.manual_seed(seed)
    found: list[dict[str, str]] = []
    while len(found) < count:
        asked = list(itertools.islice(questions, 64))
        texts = [spec["data"]["template"].format(question=question) for question in asked]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        limit = spec["rollout"]["sampling"]["maxTokens"]
        with torch.inference_mode():
            output = teacher.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=limit)
        for question, ids in zip(asked, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            if tokenizer.eos_token_id in ids:  # else the end that is added would not be the teacher's
                text = tokenizer.decode(ids[: ids.index(tokenizer.eos_token_id)], skip_special_tokens=True)
                found.append({"question": question, "answer": text})
    yield from (row for row in found[:count] if row["answer"])


def run(name: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Run once. Raise CalledProcessError if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    job = yaml.safe_load(JOB.read_text())
    job["metadata"]["name"] = f"distill-{name.lower().replace(' ', '-')}"
    job["spec"] = build_spec(name, folder, seed, steps)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "rljob.yaml"
        path.write_text(yaml.safe_dump(job))
        found = measure_job(path, folder / "run", {})
    sizes = {step.step: step.num_samples for step in found.steps}
    curve = [
        Point(each.step, sum(n for step, n in sizes.items() if step <= each.step), 0.0, each.means["exact"] or 0.0)
        for each in found.evaluations
    ]
    return {"curve": curve, "tokens_per_second": tokens_per_second(found.steps)}


def tokens_per_second(steps: tuple[StepRecord, ...]) -> float:
    """Return the sampled tokens of all steps after the first one over their time, without that of evaluations."""
    later = [step for step in steps[1:] if step.num_samples]
    seconds = sum((step.step_seconds or 0.0) - step.phase_seconds.get("evaluate", 0.0) for step in later)
    return sum(step.num_tokens for step in later) / seconds if seconds else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=NAMES, help="variants to run")
    parser.add_argument("--resume", action="store_true", help="keep the runs that have ended")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/images/distill-learning.png")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs/bench-distill")
    arguments = parser.parse_args()
    names, console = arguments.only or list(NAMES), Console(stderr=True)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed, name in itertools.product(arguments.seeds, names):
        folder = arguments.dir / f"{name}-{seed}-{arguments.steps}-steps"
        kept = folder / "result.json"
        if not (arguments.resume and kept.exists()):
            kept.unlink(missing_ok=True)
            found = run(name, seed, arguments.steps, folder)
            kept.write_text(json.dumps(found))
        found = json.loads(kept.read_text())
        results[name].append(found)
        console.print(f"{name}, seed {seed}: {found['curve'][-1][3]:.3f}, {found['tokens_per_second']:.1f} tokens/s")
    curves = {name: average([[Point(*p) for p in each["curve"]] for each in found]) for name, found in results.items()}
    speeds = {name: [each["tokens_per_second"] for each in found] for name, found in results.items()}
    ratios = {
        name: interval([own / alone for own, alone in zip(speeds[name], speeds["RL"], strict=True)])
        for name in ("distill", "self")
        if name in speeds and "RL" in speeds
    }
    draw(curves, arguments.plot, ("step", "samples"))
    print(json.dumps({"seeds": arguments.seeds, "curves": curves, "tokens_per_second": speeds, "ratios": ratios}))


if __name__ == "__main__":
    main()
