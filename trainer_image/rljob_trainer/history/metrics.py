"""Metrics of a step and of an evaluation: pure summaries, and the lines of metrics.jsonl.

Invariant: means are over valid samples only; an unknown value is null, never zero.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.reward import Reward
from rljob_api.manifest.runner import RUNNER_SERVICE
from rljob_api.wire.contract import MAX_COMPONENTS
from rljob_trainer.algorithms.advantages import average, deviation
from rljob_trainer.episodes.batches import has_signal, training_scores
from rljob_trainer.episodes.types import NOT_SAMPLED, Episode, Group, ToolCall, UpdateMetrics
from rljob_trainer.history.run_state import disk_errors

Record = dict[str, Any]
NO_TOOL = "_none"
"""Stands for the tool of calls that were not made: no function has their name, or they cannot be read."""


def mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return average(listed) if listed else None


def std(values: Sequence[float]) -> float | None:
    return deviation(values) if len(values) >= 2 else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else None


def summarize_scores(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean score, and the mean of every component over its valid results.

    With several rewards, also return each reward's mean, and prefix its components: REWARD/COMPONENT. What an
    environment or a program gave counts as a reward; the numbers of its info are its components.
    """
    names = {name for episode in episodes for name in episode.results}
    names |= {RUNNER_SERVICE for episode in episodes if episode.own_reward is not None or own_components(episode)}
    values: dict[str, list[float]] = {"score": [t.score for t in episodes if t.score is not None]}

    def add(name: str, score: float | None, components: Mapping[str, float]) -> None:
        if len(names) > 1 and score is not None:
            values.setdefault(name, []).append(score)
        for component, value in components.items():
            values.setdefault(component if len(names) == 1 else f"{name}/{component}", []).append(value)

    for episode in episodes:
        for name, result in episode.results.items():
            if result.score is not None:
                add(name, result.score, result.components)
        if episode.failure is None:
            add(RUNNER_SERVICE, episode.own_reward, own_components(episode))
    return {name: average(listed) for name, listed in values.items() if listed}


def own_components(episode: Episode) -> dict[str, float]:
    """Return the finite numbers that an environment or a program returned besides its reward; bools as 0 and 1."""
    numbers = ((name, value) for name, value in episode.info.items() if isinstance(value, int | float))
    finite = ((name, float(value)) for name, value in numbers if abs(value) <= sys.float_info.max)  # NaN is not less
    return dict(islice(finite, MAX_COMPONENTS))


def count_invalid(episodes: Iterable[Episode]) -> Counter[str]:
    """Count by reason: results, and episodes that failed, which have no result."""
    counts: Counter[str] = Counter()
    for episode in episodes:
        counts.update(str(result.reason) for result in episode.results.values() if result.reason is not None)
        counts.update([episode.failure.reason] if episode.failure else [])
    return counts


def count_versions(episodes: Sequence[Episode], rewards: Sequence[Reward]) -> dict[str, int]:
    """Count the versions of each reward among the valid scores. Results without a version count as one version."""
    results = {r.name: [t.results[r.name] for t in episodes if r.name in t.results] for r in rewards}
    valid = {name: [result for result in found if result.valid] for name, found in results.items()}
    return {name: len({result.version for result in found}) for name, found in valid.items()}


def summarize_step(
    groups: Sequence[Group], updates: Sequence[UpdateMetrics], latencies: Sequence[float], spec: RLJobSpec
) -> Record:
    episodes = [episode for group in groups for episode in group.episodes]
    totals = [total for t in episodes if (total := t.total_reward) is not None]
    results = [result for t in episodes for result in t.results.values()]
    invalid = count_invalid(episodes)
    return {
        "reward": mean(totals),
        "reward_std": std(totals),
        "components": summarize_scores(episodes),
        "reward_versions": count_versions(episodes, spec.rewards),
        "rewards": _summarize_rewards(episodes, spec),
        "reward_latency_p50_seconds": quantile(latencies, 0.5),
        "reward_latency_p95_seconds": quantile(latencies, 0.95),
        "reward_queue_p95_seconds": quantile([result.queue_seconds for result in results], 0.95),
        "reward_execute_mean_seconds": mean(result.execute_seconds for result in results),
        "num_samples": len(episodes),
        "num_masked": sum(training_scores(group, spec).count(None) for group in groups),
        "num_invalid": sum(invalid.values()),
        "invalid_by_reason": dict(invalid),
        "zero_signal_share": mean(not has_signal(group, spec) for group in groups),
        **summarize_lengths(episodes),
        **summarize_conversations(episodes),
        **summarize_updates(updates, has_reference=spec.algorithm.kl.coefficient > 0),
    }


def _summarize_rewards(episodes: Sequence[Episode], spec: RLJobSpec) -> dict[str, float | None]:
    """Return the mean of each reward's valid scores, and of what the environment or the program gave."""
    means = {
        reward.name: mean(
            result.score
            for t in episodes
            if (result := t.results.get(reward.name)) is not None and result.score is not None
        )
        for reward in spec.rewards
    }
    if spec.agent.is_hosted:
        means[RUNNER_SERVICE] = mean(t.own_reward for t in episodes if t.own_reward is not None and t.failure is None)
    return means


def count_staleness(episodes: Iterable[Episode], finished_steps: int) -> Counter[int]:
    """Count the sampled tokens by staleness: `finished_steps` before the step that trains them, minus the version of
    the weights that sampled them."""
    versions = (version for t in episodes for segment in t.segments for version in segment.versions)
    return Counter(finished_steps - version for version in versions if version != NOT_SAMPLED)


def summarize_schedule(
    staleness: Mapping[int, int], busy_shares: Mapping[str, float], num_replaced_groups: int
) -> Record:
    """Return what the schedule did in a step. `staleness`: of `count_staleness`; `busy_shares`: of
    `driver.role_clock.RoleClock.shares`."""
    num_tokens = sum(staleness.values())
    return {
        "staleness_mean": sum(steps * count for steps, count in staleness.items()) / num_tokens if num_tokens else None,
        "staleness_max": max(staleness, default=None),
        "staleness_histogram": {str(steps): count for steps, count in sorted(staleness.items())},
        "busy_shares": dict(busy_shares),
        "num_replaced_groups": num_replaced_groups,
    }


def summarize_lengths(episodes: Sequence[Episode]) -> Record:
    """Return the sampled tokens per episode, and the share that the token limit cut."""
    return {
        "response_tokens_mean": mean(t.num_sampled for t in episodes),
        "response_tokens_max": max((t.num_sampled for t in episodes), default=None),
        "truncated_share": mean(t.truncated for t in episodes),
    }


def summarize_conversations(episodes: Sequence[Episode]) -> Record:
    """Return what the turns, tools and the user did; empty without conversations. A mean over nothing is null."""
    found = [episode for episode in episodes if episode.messages]
    if not found:
        return {}
    turns = [turn for episode in found for turn in episode.turns]
    calls = [call for turn in turns for call in turn.tool_calls]
    user_seconds = [turn.user_seconds for turn in turns if turn.user_seconds is not None]
    by_tool = {name: [call for call in calls if call.tool == name] for name in sorted({call.tool for call in calls})}
    return {
        "agent": {
            "turns_mean": mean(len(episode.turns) for episode in found),
            "turn_reward_mean": mean(turn.reward for turn in turns if turn.reward is not None),
            "user_seconds_mean": mean(user_seconds),
            "user_seconds_max": max(user_seconds, default=None),
            "tool_calls_mean": mean(sum(len(turn.tool_calls) for turn in episode.turns) for episode in found),
            "tools": {name or NO_TOOL: _summarize_calls(of_tool) for name, of_tool in by_tool.items()},
            "segments_mean": mean(len(episode.segments) for episode in found),
            "segments_by_cause": dict(Counter(each.cause for episode in found for each in episode.breaks)),
            "episodes_by_end": dict(Counter(episode.end.value for episode in found)),
            "failures": dict(Counter(episode.failure.service for episode in found if episode.failure)),
        }
    }


def _summarize_calls(calls: Sequence[ToolCall]) -> Record:
    return {
        "calls": len(calls),
        "errors": sum(bool(call.error) for call in calls),
        "seconds_mean": mean(call.seconds for call in calls),
        "seconds_max": max(call.seconds for call in calls),
    }


def summarize_updates(updates: Sequence[UpdateMetrics], *, has_reference: bool) -> Record:
    """Return the means over a step's updates; of what is a mean over tokens, those with trained tokens. The KL is
    unknown without a reference. What compares the trainer with the rollout is of the first update: later ones differ
    from the rollout on purpose."""
    if not updates:
        return {}
    num_tokens = sum(update.num_tokens for update in updates)
    trained = [update for update in updates if update.trained_share > 0]
    first = next(iter(trained), None)
    of_update = ("loss", "policy_loss", "grad_norm")
    of_tokens = ("kl", "entropy", "clip_fraction", "corrected_share", "effective_sample_share")
    summary: Record = {name: mean(getattr(update, name) for update in updates) for name in of_update}
    summary |= {name: mean(getattr(update, name) for update in trained) for name in of_tokens}
    return summary | {
        "kl": summary["kl"] if has_reference else None,
        "critic_loss": mean(update.critic_loss for update in updates if update.critic_loss is not None),
        "logprob_difference": first.logprob_difference if first else None,
        "mismatch_kl": first.mismatch_kl if first else None,
        "mismatch_max": first.mismatch_max if first else None,
        "num_skipped_updates": sum(update.is_skipped for update in updates),
        "learning_rate": updates[-1].learning_rate,
        "num_tokens": num_tokens,
        "trained_share": sum(u.trained_share * u.num_tokens for u in updates) / num_tokens if num_tokens else None,
        "num_micro_batches": sum(update.num_micro_batches for update in updates),
    }


def flatten(record: Record, prefix: str = "") -> dict[str, float]:
    """Return the numbers of a record by slash-joined name, for trackers."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[f"{prefix}{name}"] = float(value)
    return flat


def append_line(path: Path, record: Record) -> None:
    """Append one JSON object. Raise UserError if the disk is full."""
    line = json.dumps(_finite(record), allow_nan=False)
    with disk_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by null, since JSON has none. The norm of a gradient may be infinite."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
