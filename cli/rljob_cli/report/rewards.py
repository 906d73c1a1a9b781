"""Each reward of a run: how it scored, and where the time until its results went. Pure."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rljob_api.run.trajectories import ResultRow, SampleRow
from rljob_cli.run.summary import list_known


@dataclass(frozen=True)
class RewardTimes:
    """Times of the samples that were read. None: no result has the value."""

    name: str
    num_results: int
    num_valid: int
    mean_score: float | None
    """Mean of valid results."""
    latency_p50_seconds: float | None
    """From the end of a trajectory to the result."""
    latency_p95_seconds: float | None
    queue_p95_seconds: float | None
    """In the server, before the execution."""
    execute_mean_seconds: float | None


def summarize_rewards(samples: Iterable[SampleRow]) -> list[RewardTimes]:
    """Return one entry per reward, in order of appearance."""
    results: dict[str, list[ResultRow]] = {}
    for sample in samples:
        for result in sample.rewards:
            results.setdefault(result.name, []).append(result)
    return [_summarize(name, found) for name, found in results.items()]


def _summarize(name: str, results: Sequence[ResultRow]) -> RewardTimes:
    scores = list_known(result.score for result in results)
    latencies = list_known(result.latency_seconds for result in results)
    executions = list_known(result.execute_seconds for result in results)
    return RewardTimes(
        name=name,
        num_results=len(results),
        num_valid=sum(result.valid for result in results),
        mean_score=statistics.fmean(scores) if scores else None,
        latency_p50_seconds=_quantile(latencies, 0.5),
        latency_p95_seconds=_quantile(latencies, 0.95),
        queue_p95_seconds=_quantile(list_known(result.queue_seconds for result in results), 0.95),
        execute_mean_seconds=statistics.fmean(executions) if executions else None,
    )


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank quantile, as metrics.jsonl has it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else None
