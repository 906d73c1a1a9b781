"""What must hold of a check's commands. Pure, but for the files of runs that they read.

Each judgement returns what was found, and raises `BrokenError` with what does not hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics
from rljob_api.run.summaries import RunSummary, read_run_summary

_MAX_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean over a step of how far trainer and rollout are apart about a token's log-prob, by trainer.dtype."""
_NORM_TOLERANCE = 0.05
"""Relative difference of gradient norms that are equal up to rounding."""
_SHOWN_CHARACTERS = 200


class BrokenError(Exception):
    """What does not hold."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int | None
    """None: it did not end in time, and was stopped."""
    output: str
    """stdout and stderr."""


Judgement = Callable[[Sequence[Ended]], str]


def require(holds: bool, problem: str) -> None:
    if not holds:
        raise BrokenError(problem)


def succeed(ended: Sequence[Ended]) -> str:
    """Every command ends with 0. Return the last line."""
    for number, each in enumerate(ended, 1):
        require(each.code == 0, f"command {number} ended with {each.code}: {_last_line(each.output)}")
    return _last_line(ended[-1].output)


def _last_line(output: str) -> str:
    """Return the last line; of a job that failed, the line with the reason."""
    lines = [line for line in reversed(output.splitlines()) if line.strip()]
    return next((line for line in lines if "] Failed: " in line), next(iter(lines), ""))[:_SHOWN_CHARACTERS]


def both(*judgements: Judgement) -> Judgement:
    """All hold of the same commands."""
    return lambda ended: "; ".join(judge(ended) for judge in judgements)


def read_json(ended: Ended) -> dict[str, Any]:
    """Return the object of the last line that is one."""
    found = _read_lines(ended)
    require(bool(found), f"it printed no JSON: {_last_line(ended.output)}")
    return found[-1]


def _read_lines(ended: Ended) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]


def check_engine(ended: Sequence[Ended]) -> str:
    """The parts of bench/accept_engine.py hold. What a failure says begins with the last part that ended."""
    parts = _read_lines(ended[-1])
    last = f"after {parts[-1]['part']}" if parts else "before its first part"
    require(ended[-1].code == 0, f"{last}: {_last_line(ended[-1].output)}")
    runner = next(part["runner"] for part in parts if "runner" in part)
    largest = max(part["logprob_difference"] for part in parts if "logprob_difference" in part)
    slept = next(part for part in parts if "asleep_bytes" in part)
    memory = " -> ".join(f"{slept[name] / 2**30:.1f}" for name in ("awake_bytes", "asleep_bytes"))
    seconds = sum(part["seconds"] for part in parts)
    return f"{runner}; log-probs differ by {largest:.1g}; level {slept['level']}: {memory} GiB; {seconds:.0f} s"


def check_policy(min_share: float) -> Judgement:
    """The updates of bench/policy.py compute tokens, with at least this share of the device's peak."""

    def judge(ended: Sequence[Ended]) -> str:
        succeed(ended)
        result = read_json(ended[-1])["result"]
        require(result["tokens_per_second"] > 0, "no tokens were computed")
        share, memory = result["share_of_peak"], result["peak_memory_bytes"] / 2**30
        require(0 < share < 1, f"the share of the peak is {share}")
        require(share >= min_share, f"the share of the peak is {share:.3f}, and at least {min_share} is expected")
        return f"{result['tokens_per_second']:,.0f} tokens/s, {100 * share:.0f}% of the peak, {memory:.1f} GiB"

    return judge


def check_weights(max_copies: float) -> Judgement:
    """Weights reach a receiver, within the time of this many memory copies."""

    def judge(ended: Sequence[Ended]) -> str:
        succeed(ended)
        (result,) = read_json(ended[-1])["results"]
        seconds, copy = result["seconds"]["both"], result["copy_seconds"]
        require(seconds > 0 and copy > 0, f"it took {seconds} s, and a copy {copy} s")
        num_copies = seconds / copy
        require(
            num_copies <= max_copies, f"it took {num_copies:.1f} memory copies, and at most {max_copies} are expected"
        )
        return f"{result['gigabytes']:.2g} GB in {seconds:.2f} s, {num_copies:.1f} memory copies"

    return judge


def read_summary(folder: Path) -> RunSummary:
    summary = read_run_summary(folder)
    require(summary is not None, f"{folder} has no summary.json")
    assert summary is not None
    return summary


def check_run(folder: Path, steps: int, dtype: str) -> Judgement:
    """A run of `steps` steps succeeds, and both sides agree about the log-probs of tokens."""

    def judge(ended: Sequence[Ended]) -> str:
        succeed(ended)
        summary = read_summary(folder)
        require((summary.phase, summary.steps) == ("Succeeded", steps), f"{summary.phase} after step {summary.steps}")
        found = max(summary.logprob_difference, default=0.0)
        require(bool(summary.logprob_difference), "no difference of log-probs was measured")
        require(found <= _MAX_DIFFERENCE[dtype], f"log-probs of trainer and rollout differ by {found:.2g}")
        return f"{steps} steps, log-probs differ by {found:.1g}"

    return judge


def check_learning(folder: Path, steps: int, dtype: str) -> Judgement:
    """The same, and the held-out accuracy rises."""

    def judge(ended: Sequence[Ended]) -> str:
        found, summary = check_run(folder, steps, dtype)(ended), read_summary(folder)
        before, after = summary.accuracy_before or 0.0, summary.accuracy_after or 0.0
        require(after > before, f"the held-out accuracy went from {before:.3f} to {after:.3f}")
        return f"{found}, accuracy {before:.3f} -> {after:.3f}"

    return judge


def check_resume(folder: Path, first: int, steps: int) -> Judgement:
    """The second command goes on after the step at which the first one ended."""

    def judge(ended: Sequence[Ended]) -> str:
        succeed(ended)
        said = f"resumes after step {first}"
        require(said in ended[1].output, f"the second command did not say: {said}")
        found = [record.step for record in read_metrics(folder / FILE_METRICS).steps]
        require(found == list(range(1, steps + 1)), f"the steps are {found}")
        return f"steps 1 to {first}, then to {steps}"

    return judge


def check_digests(folder: Path) -> Judgement:
    """Trainer and rollouts have the same last weights."""

    def judge(ended: Sequence[Ended]) -> str:
        digests = read_summary(folder).weight_digests
        require(len(digests) > 1, f"{len(digests)} processes have a digest")
        require(len(set(digests.values())) == 1, f"they differ: {digests}")
        return f"{len(digests)} processes agree"

    return judge


def check_norms(folders: Sequence[Path]) -> Judgement:
    """The first gradients of the runs are the same, up to rounding."""

    def judge(ended: Sequence[Ended]) -> str:
        succeed(ended)
        norms = [read_metrics(folder / FILE_METRICS).steps[0].grad_norm for folder in folders]
        known = [norm for norm in norms if norm]
        require(len(known) == len(folders), f"the gradient norms are {norms}")
        require(max(known) <= min(known) * (1 + _NORM_TOLERANCE), f"the gradient norms differ: {known}")
        return f"gradient norms {', '.join(f'{norm:.4g}' for norm in known)}"

    return judge


def check_out_of_memory(ended: Sequence[Ended]) -> str:
    """The job fails, and names the field to lower."""
    require(ended[-1].code == 1, f"it ended with {ended[-1].code}, not 1: {_last_line(ended[-1].output)}")
    named = "spec.trainer.microBatchTokens: a rank ran out of GPU memory"
    require(named in ended[-1].output, f"it did not say: {named}")
    return "a user error that names spec.trainer.microBatchTokens"
