"""Metrics of a step and of an evaluation: pure summaries, the parts of the records of `rljob_api.run.metrics`.

Invariant: means are over valid samples only; an unknown value is null, never zero.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import numpy as np

from rljob_api.manifest.services.reward import Reward
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.run.metrics import (
    AgentNumbers,
    EpisodeNumbers,
    RewardNumbers,
    ScheduleNumbers,
    SourceNumbers,
    ToolNumbers,
    UpdateNumbers,
)
from rljob_api.wire.contract import MAX_COMPONENTS
from rljob_trainer.algorithms.advantages import average, deviation
from rljob_trainer.algorithms.base import AlgorithmCode, Settings
from rljob_trainer.algorithms.rows import has_signal, training_scores
from rljob_trainer.episodes.types import NOT_SAMPLED, Episode, Group, UpdateMetrics

NO_TOOL = "_none"
"""Stands for the tool of calls that were not made: no function has their name, or they cannot be read."""


_MEANS_OF_TRAINED = ("entropy", "clip_fraction", "corrected_share", "rejected_share", "effective_sample_share")


def mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return average(listed) if listed else None


def std(values: Sequence[float]) -> float | None:
    return deviation(values) if len(values) >= 2 else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else None


def summarize_scores(episodes: Sequence[Episode], rewards: Iterable[str] = ()) -> dict[str, float]:
    """Return the mean of each list of `collect_scores`."""
    return {name: average(listed) for name, listed in collect_scores(episodes, rewards).items()}


def collect_scores(episodes: Sequence[Episode], rewards: Iterable[str] = ()) -> dict[str, list[float]]:
    """Return the scores, and every component of the valid results; no empty lists. `rewards`: names of the job's, of
    which these episodes may lack some.

    With several rewards, also return each reward's scores, and prefix its components: REWARD/COMPONENT. What an
    environment or a program gave counts as a reward; the numbers of its info are its components.
    """
    values: dict[str, list[float]] = {}
    for scores in list_scores(episodes, rewards):
        for name, value in scores.items():
            values.setdefault(name, []).append(value)
    return values


def list_scores(episodes: Sequence[Episode], rewards: Iterable[str] = ()) -> list[dict[str, float]]:
    """Return the scores and components of each episode, by the names of `collect_scores`.  [episodes]"""
    names = {*rewards, *(name for episode in episodes for name in episode.results)}
    names |= {RUNNER_SERVICE for episode in episodes if episode.own_reward is not None or own_components(episode)}
    return [_read_scores(episode, is_alone=len(names) == 1) for episode in episodes]


def _read_scores(episode: Episode, *, is_alone: bool) -> dict[str, float]:
    """`is_alone`: whether the job has one reward."""
    given = [(name, found.score, found.components) for name, found in episode.results.items() if found.valid]
    if episode.failure is None:
        given.append((RUNNER_SERVICE, episode.own_reward, own_components(episode)))
    values: dict[str, float] = {}
    for name, score, components in given:
        if not is_alone and score is not None:
            values[name] = score
        values |= {component if is_alone else f"{name}/{component}": value for component, value in components.items()}
    return values if episode.score is None else {"score": episode.score, **values}


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


def count_scored_failures(episodes: Iterable[Episode]) -> Counter[str]:
    """Count by reason the failed results that have a score by failurePolicy.scores."""
    causes = (result.failed_as for episode in episodes for result in episode.results.values())
    return Counter(str(cause) for cause in causes if cause is not None)


def count_versions(episodes: Sequence[Episode], rewards: Sequence[Reward]) -> dict[str, int]:
    """Count the versions of each reward among the valid scores. Results without a version count as one version."""
    results = {r.name: [t.results[r.name] for t in episodes if r.name in t.results] for r in rewards}
    valid = {name: [result for result in found if result.valid] for name, found in results.items()}
    return {name: len({result.version for result in found}) for name, found in valid.items()}


def summarize_rewards(
    groups: Sequence[Group], latencies: Sequence[float], algorithm: AlgorithmCode, success: float | None = None
) -> RewardNumbers:
    """`success`: spec.data.curriculum.success."""
    settings = algorithm.settings
    episodes = [episode for group in groups for episode in group.episodes]
    totals = [total for t in episodes if (total := t.total_reward) is not None]
    results = [result for t in episodes for result in t.results.values()]
    return RewardNumbers(
        reward=mean(totals),
        reward_std=std(totals),
        components={**summarize_scores(episodes, [reward.name for reward in settings.rewards])},
        reward_versions=count_versions(episodes, settings.rewards),
        rewards=_summarize_each_reward(episodes, settings),
        reward_latency_p50_seconds=quantile(latencies, 0.5),
        reward_latency_p95_seconds=quantile(latencies, 0.95),
        reward_queue_p95_seconds=quantile([result.queue_seconds for result in results], 0.95),
        reward_execute_mean_seconds=mean(result.execute_seconds for result in results),
        num_masked=sum(training_scores(group, settings).count(None) for group in groups),
        scored_failures_by_reason=count_scored_failures(episodes),
        zero_signal_share=mean(not has_signal(group, algorithm) for group in groups),
        sources=_summarize_sources(groups, algorithm, success),
    )


def _summarize_sources(
    groups: Sequence[Group], algorithm: AlgorithmCode, success: float | None
) -> dict[str, SourceNumbers]:
    """Return the numbers of each source; none if the prompts do not name theirs."""
    names = sorted({group.prompt.source for group in groups} - {""})
    parts = {name: [group for group in groups if group.prompt.source == name] for name in names}
    found = {}
    for name, part in parts.items():
        totals = [total for group in part for t in group.episodes if (total := t.total_reward) is not None]
        found[name] = SourceNumbers(
            share=len(part) / len(groups),
            reward=mean(totals),
            success=None if success is None else mean(total >= success for total in totals),
            zero_signal_share=mean(not has_signal(group, algorithm) for group in part),
        )
    return found


def _summarize_each_reward(episodes: Sequence[Episode], settings: Settings) -> dict[str, float | None]:
    """Return the mean of each reward's valid scores, and of what the environment or the program gave."""
    means = {
        reward.name: mean(
            result.score
            for t in episodes
            if (result := t.results.get(reward.name)) is not None and result.score is not None
        )
        for reward in settings.rewards
    }
    if settings.own_weight is not None:
        means[RUNNER_SERVICE] = mean(t.own_reward for t in episodes if t.own_reward is not None and t.failure is None)
    return means


def count_staleness(episodes: Iterable[Episode], finished_steps: int) -> Counter[int]:
    """Count the sampled tokens by staleness: `finished_steps` before the step that trains them, minus the version of
    the weights that sampled them."""
    counts: Counter[int] = Counter()
    for segment in (segment for episode in episodes for segment in episode.segments):
        # Nearly always, one version sampled all tokens of a segment.
        newest = int(segment.versions.max(initial=NOT_SAMPLED))
        number = int(np.count_nonzero(segment.versions == newest)) if newest != NOT_SAMPLED else 0
        if number == np.count_nonzero(segment.loss_mask):
            counts.update({finished_steps - newest: number} if number else {})
        else:
            versions, numbers = np.unique_counts(segment.versions[segment.versions != NOT_SAMPLED])
            counts.update(dict(zip((finished_steps - versions).tolist(), numbers.tolist(), strict=True)))
    return counts


def summarize_schedule(
    staleness: Mapping[int, int],
    busy_shares: Mapping[str, float],
    num_replaced_groups: int,
    num_skipped_prompts: int = 0,
    turns_by_prefix: Mapping[str, int] | None = None,
) -> ScheduleNumbers:
    """Return what the schedule did in a step. `staleness`: of `count_staleness`; `busy_shares`: of
    `driver.role_clock.RoleClock.shares`; `turns_by_prefix`: of `replicas.fleet.Fleet.num_picked`."""
    num_tokens = sum(staleness.values())
    mean_steps = sum(steps * count for steps, count in staleness.items()) / num_tokens if num_tokens else None
    return ScheduleNumbers(
        staleness_mean=mean_steps,
        staleness_max=max(staleness, default=None),
        staleness_histogram=dict(sorted(staleness.items())),
        busy_shares={**busy_shares},
        num_replaced_groups=num_replaced_groups,
        num_skipped_prompts=num_skipped_prompts,
        turns_by_prefix={**(turns_by_prefix or {})},
    )


def summarize_episodes(episodes: Sequence[Episode]) -> EpisodeNumbers:
    """Return the counts of samples and invalid results, the sampled tokens, and what the conversations did."""
    invalid, lengths = count_invalid(episodes), [episode.num_sampled for episode in episodes]
    return EpisodeNumbers(
        num_samples=len(episodes),
        num_invalid=sum(invalid.values()),
        invalid_by_reason=invalid,
        response_tokens_mean=mean(lengths),
        response_tokens_max=max(lengths, default=None),
        truncated_share=mean(t.truncated for t in episodes),
        seat_rewards=summarize_seats(episodes),
        agent=summarize_conversations([episode for episode in episodes if episode.messages]),
    )


def summarize_seats(episodes: Sequence[Episode]) -> dict[str, float | None]:
    """Return the mean of what training raises, by seat. Empty if episodes have one player."""
    totals: dict[str, list[float]] = {seat: [] for seat in sorted({e.seat for e in episodes if e.seat})}
    for episode in episodes:
        if episode.seat and (total := episode.total_reward) is not None:
            totals[episode.seat].append(total)
    return {seat: mean(of_seat) for seat, of_seat in totals.items()}


def summarize_conversations(episodes: Sequence[Episode]) -> AgentNumbers | None:
    """Return what the turns, tools and the user did; None without conversations."""
    if not episodes:
        return None
    turns = [turn for episode in episodes for turn in episode.turns]
    calls = [call for turn in turns for call in turn.tool_calls]
    user_seconds = [turn.user_seconds for turn in turns if turn.user_seconds is not None]
    by_tool = {name: [call for call in calls if call.tool == name] for name in sorted({call.tool for call in calls})}
    return AgentNumbers(
        turns_mean=mean(len(episode.turns) for episode in episodes),
        turn_reward_mean=mean(turn.reward for turn in turns if turn.reward is not None),
        user_seconds_mean=mean(user_seconds),
        user_seconds_max=max(user_seconds, default=None),
        tool_calls_mean=mean(sum(len(turn.tool_calls) for turn in episode.turns) for episode in episodes),
        tools={
            name or NO_TOOL: ToolNumbers(
                calls=len(of_tool),
                errors=sum(bool(call.error) for call in of_tool),
                seconds_mean=mean(call.seconds for call in of_tool),
                seconds_max=max(call.seconds for call in of_tool),
            )
            for name, of_tool in by_tool.items()
        },
        segments_mean=mean(len(episode.segments) for episode in episodes),
        segments_by_cause=Counter(each.cause for episode in episodes for each in episode.breaks),
        episodes_by_end=Counter(episode.end.value for episode in episodes),
        failures=Counter(episode.failure.service for episode in episodes if episode.failure),
    )


def summarize_updates(
    updates: Sequence[UpdateMetrics], *, has_reference: bool, is_given: bool = False
) -> UpdateNumbers:
    """Return the means over a step's updates; of what is a mean over tokens, those with trained tokens. The KL is
    unknown without a reference. What compares the trainer with the rollout is of the first update: later ones differ
    from the rollout on purpose. `is_given`: the tokens are given, not sampled, so such numbers are unknown."""
    num_tokens = sum(update.num_tokens for update in updates)
    trained = [update for update in updates if update.trained_share > 0]
    first = trained[0] if trained and not is_given else None
    known = ("entropy",) if is_given else _MEANS_OF_TRAINED
    return UpdateNumbers(
        loss=mean(update.loss for update in updates),
        policy_loss=mean(update.policy_loss for update in updates),
        grad_norm=mean(update.grad_norm for update in updates),
        kl=mean(update.kl for update in trained) if has_reference and not is_given else None,
        **{name: mean(getattr(each, name) for each in trained) for name in known},
        critic_loss=mean(update.critic_loss for update in updates if update.critic_loss is not None),
        logprob_difference=first.logprob_difference if first else None,
        mismatch_kl=first.mismatch_kl if first else None,
        mismatch_max=first.mismatch_max if first else None,
        num_skipped_updates=sum(update.is_skipped for update in updates),
        learning_rate=updates[-1].learning_rate if updates else None,
        num_tokens=num_tokens,
        trained_share=sum(u.trained_share * u.num_tokens for u in updates) / num_tokens if num_tokens else None,
        num_micro_batches=sum(update.num_micro_batches for update in updates),
    )
