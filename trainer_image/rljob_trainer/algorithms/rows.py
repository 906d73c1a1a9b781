"""Scored groups to what algorithms read, and advantages to rows for the trainer. Pure.

    groups --> inspection_rows --> (facts) --> episode_rewards --> (advantages) --> build_rows; denominator

Invariants: an invalid result is masked, never a zero. An episode counts once, whatever the number of its segments; of
an episode with seats each trajectory counts once, and is compared with those of its seat alone. A masked episode has
rows without a token to train on, and is in no mean and no denominator. Denominators add up over groups, so an update
may be accumulated group by group.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.contract import MAX_TRAJECTORIES
from rljob_trainer.algorithms import advantages as statistics
from rljob_trainer.algorithms.base import AlgorithmCode, EpisodeAdvantages, EpisodeRewards, Settings
from rljob_trainer.algorithms.teachers import find_top, teacher_advantages, teaches
from rljob_trainer.episodes.types import Episode, Group, TokenFacts, TrainRow, has_own_reward

_NO_TOKENS, _NO_VALUES = np.zeros(0, np.int32), np.zeros(0)
_MAX_GROUP_SIZE = 1024 * MAX_TRAJECTORIES
"""With the manifest's limit of samples. A trajectory's number is unique over all groups of a job."""


def score_group(group: Group, rewards: Sequence[Reward], own_weight: float = 1.0) -> None:
    """Set the score of each episode: the weighted sum of its rewards; None if one is missing or invalid, or the sum
    overflows. `own_weight`: of what the environment or the program gave the episode, if it gave something.

    Among episodes that are compared with each other, a reward that scores none and abstains, as one for other tasks
    does, is left out, and so is such a function of a list. One that abstains from some masks these: their sums would
    lack a term. A teacher is a term only where nothing else scores; an episode that it failed to score is masked."""
    are_alone = bool(rewards) and all(each.teacher for each in rewards)
    are_alone = are_alone and not any(map(has_own_reward, group.episodes))
    for peers in {each.peers for each in group.episodes}:
        episodes = [each for each in group.episodes if each.peers == peers and each.failure is None]
        results = {reward.name: [each.results.get(reward.name) for each in episodes] for reward in rewards}
        parts = {name: [{*each.abstained} for each in found if each and each.valid] for name, found in results.items()}
        left_out = {name: set.intersection(*found) for name, found in parts.items() if found}
        for episode in episodes:
            total, has_term, is_whole = own_weight * (episode.own_reward or 0.0), not rewards, True
            for reward in rewards:
                result = episode.results.get(reward.name)
                if reward.teacher is not None:
                    has_term, is_whole = has_term or result is not None, is_whole and (result is None or result.valid)
                    total += reward.weight * (result.score or 0.0) if are_alone and result is not None else 0.0
                elif result is not None and result.score is not None:
                    total += reward.weight * result.score
                    has_term, is_whole = True, is_whole and left_out[reward.name].issuperset(result.abstained)
                elif result is None or result.reason is not InvalidReason.ABSTAINED or reward.name in left_out:
                    is_whole = False
            is_known = is_whole and (has_term or has_own_reward(episode)) and math.isfinite(total)
            episode.score = total if is_known else None


def usable_scores(group: Group, rewards: Sequence[Reward]) -> list[float | None]:
    """Return the group's scores, None for each sample whose rewards are not usable.  [episodes]

    The same holds for an episode that its program left without a reward, while it rewarded others with which it is
    compared: nothing would count as zero.
    """
    drops_group = {reward.name for reward in rewards if reward.failure_policy.action == "dropGroup"}
    for episode in group.episodes:
        if any(not episode.results[name].valid for name in drops_group if name in episode.results):
            return [None] * len(group.episodes)
    need_own = {episode.peers for episode in group.episodes if episode.own_reward is not None}
    return [
        None if episode.peers in need_own and not has_own_reward(episode) else episode.score
        for episode in group.episodes
    ]


def training_scores(group: Group, settings: Settings) -> list[float | None]:
    """Return the scores that the group trains with, None for each episode that must not be trained on: its rewards are
    not usable, or it is truncated and the job masks those.  [episodes]"""
    scores = usable_scores(group, settings.rewards)
    if settings.rewards and not settings.summed and not any(map(has_own_reward, group.episodes)):
        # The sum of teachers is shown, and no advantage follows from it: those of the tokens say it already.
        scores = [None if score is None else 0.0 for score in scores]
    return [_training_score(*pair, settings) for pair in zip(group.episodes, scores, strict=True)]


def has_signal(group: Group, algorithm: AlgorithmCode) -> bool:
    """Return whether the group's episodes differ in what they got, beyond algorithm.zeroStdThreshold. With a critic or
    a teacher, one valid episode is enough: it is compared with what the critic expected, or the teacher would say. With
    seats: whether those of any seat do."""
    pairs = list(zip(group.episodes, training_scores(group, algorithm.settings), strict=True))
    return any(_differ([pairs[i] for i in positions], algorithm) for positions in group.compared())


def _differ(pairs: Sequence[tuple[Episode, float | None]], algorithm: AlgorithmCode) -> bool:
    valid = [_describe(episode, score, algorithm.settings, _NO_TOKENS) for episode, score in pairs if score is not None]
    taught = (teaches(algorithm.settings.rewards, each) for each, score in pairs if score is not None)
    if algorithm.needs.values or any(taught):
        return bool(valid)
    if len({_until_last_reward(each.turn_rewards) for each in valid}) > 1:
        return True
    options = algorithm.settings.algorithm
    per_reward, threshold = options.advantages.per_reward, options.zero_std_threshold
    columns = zip(*(each.components if per_reward else [statistics.total_reward(each)] for each in valid), strict=True)
    return any(statistics.has_signal(column, threshold) for column in columns)


def _until_last_reward(turn_rewards: Sequence[float]) -> tuple[float, ...]:
    count = len(turn_rewards)
    while count and turn_rewards[count - 1] == 0:
        count -= 1
    return tuple(turn_rewards[:count])


def should_replace(group: Group, algorithm: AlgorithmCode) -> bool:
    """Return whether another group should train in place of this one, as far as replacements are left."""
    return algorithm.settings.max_replacements > 0 and not has_signal(group, algorithm)


def inspection_rows(groups: Sequence[Group], settings: Settings) -> list[TrainRow]:
    """Return the rows of all episodes, in order, for Trainer.inspect. They have no advantages yet."""
    nothing = [
        [None if score is None else EpisodeAdvantages(np.zeros(episode.num_sampled)) for episode, score in pairs]
        for group in groups
        for pairs in [zip(group.episodes, training_scores(group, settings), strict=True)]
    ]
    return [row for rows in build_rows(groups, nothing, settings) for row in rows]


def episode_rewards(
    groups: Sequence[Group], settings: Settings, facts: Sequence[TokenFacts] | None = None
) -> list[list[EpisodeRewards | None]]:
    """Return what advantages are computed from; None for a masked episode.  [groups][episodes]

    `facts`: of inspection_rows(groups), in their order.
    """
    remaining = iter(facts or ())
    return [
        [
            _rewards_of(episode, score, settings, [next(remaining) for _ in episode.segments] if facts else None)
            for episode, score in zip(group.episodes, training_scores(group, settings), strict=True)
        ]
        for group in groups
    ]


def find_advantages(
    groups: Sequence[Group], rewards: Sequence[Sequence[EpisodeRewards | None]], algorithm: AlgorithmCode
) -> list[list[EpisodeAdvantages | None]]:
    """Return the algorithm's advantages, for which trajectories that are compared with each other are a group, with
    what teachers add; None for a masked one.  [groups][episodes]

    `rewards`: of episode_rewards(groups). What the rewards of two seats sum up to has no influence: in a zero-sum game
    each seat learns from its own.
    """
    parts = [(number, positions) for number, group in enumerate(groups) for positions in group.compared()]
    of_parts = algorithm.advantages([[rewards[number][i] for i in positions] for number, positions in parts])
    found: list[list[EpisodeAdvantages | None]] = [[None] * len(group.episodes) for group in groups]
    for (number, positions), advantages in zip(parts, of_parts, strict=True):
        for position, advantage in zip(positions, advantages, strict=True):
            of_episode = rewards[number][position]
            if advantage is not None and of_episode is not None and of_episode.teachers is not None:
                advantage = replace(advantage, advantages=advantage.advantages + of_episode.teachers)
            found[number][position] = advantage
    return found


def build_rows(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[EpisodeAdvantages | None]],
    settings: Settings,
    facts: Sequence[TokenFacts] | None = None,
) -> list[list[TrainRow]]:
    """Return the rows of each group, in the order of its episodes and their segments.  [groups][rows]

    `advantages`: of the algorithm, [groups][episodes]. `facts`: of inspection_rows(groups), in their order.
    """
    remaining = iter(facts or ())
    return [
        [
            row
            for episode, given in zip(group.episodes, of_episodes, strict=True)
            for row in _rows_of(
                episode, given, settings, [next(remaining) if facts else TokenFacts() for _ in episode.segments]
            )
        ]
        for group, of_episodes in zip(groups, advantages, strict=True)
    ]


def record_advantages(episode: Episode, rewards: EpisodeRewards | None, given: EpisodeAdvantages | None) -> None:
    """Record the means that the trajectory log shows: of the episode, and of each turn. `rewards`: what `given` was
    computed from; None for a masked episode."""
    turns = _NO_TOKENS if rewards is None else rewards.turn_of_token
    advantages = _NO_VALUES if given is None else given.advantages
    episode.advantage = _mean(advantages)
    bounds = turns.searchsorted(np.arange(len(episode.turns) + 1)).tolist()
    for turn, (start, end) in zip(episode.turns, pairwise(bounds), strict=True):
        turn.advantage = _mean(advantages[start:end])


def _mean(values: NDArray[np.float64]) -> float | None:
    """Return what values.mean() returns, in half the time; None for no value."""
    return float(np.add.reduce(values) / len(values)) if len(values) else None


def denominator(groups: Sequence[Group], settings: Settings) -> float:
    """Return by what the summed gradient of an update over `groups` is divided: its trained tokens or episodes."""
    trained = [
        count
        for group in groups
        for episode, score in zip(group.episodes, training_scores(group, settings), strict=True)
        if score is not None and (count := episode.num_sampled)
    ]
    return float(sum(trained) if settings.level == "token" else len(trained))


def _training_score(episode: Episode, score: float | None, settings: Settings) -> float | None:
    if score is None or (settings.truncated == "mask" and episode.truncated):
        return None
    score -= _overlong_penalty(episode, settings)
    return score if math.isfinite(score + sum(_turn_rewards(episode))) else None


def _overlong_penalty(episode: Episode, settings: Settings) -> float:
    """Return DAPO's soft overlong punishment of the longest answer: 0 before the buffer, all of it at the limit."""
    if settings.truncated != "shape":
        return 0.0
    penalty = settings.algorithm.truncated.penalty
    if episode.truncated:
        return penalty
    longest = int(np.bincount(_turn_of_token(episode), minlength=1).max())
    limit = episode.sampling.max_tokens or settings.max_tokens  # the job's may have changed since
    buffer = min(limit, settings.buffer_tokens)
    return penalty * max(0.0, (longest - limit + buffer) / buffer)


def _rewards_of(
    episode: Episode, score: float | None, settings: Settings, facts: Sequence[TokenFacts] | None
) -> EpisodeRewards | None:
    """`facts`: of the episode's segments; None: the algorithm needs none."""
    if score is None:
        return None
    return _describe(episode, score, settings, _sorted_turns(episode), facts)


def _describe(
    episode: Episode,
    score: float,
    settings: Settings,
    turn_of_token: NDArray[np.int32],
    facts: Sequence[TokenFacts] | None = None,
) -> EpisodeRewards:
    components = [result.score or 0.0 for reward in settings.summed for result in [episode.results[reward.name]]]
    components += [] if settings.own_weight is None else [episode.own_reward or 0.0]
    return EpisodeRewards(
        score=score,
        turn_rewards=_turn_rewards(episode),
        turn_of_token=turn_of_token,
        components=[*components, -_overlong_penalty(episode, settings)],
        reference_kl=_to_turns(_reference_kl(episode, facts), episode) if facts else None,
        values=_to_turns(_values(episode, facts), episode) if facts else None,
        teachers=_to_turns(teacher_advantages(settings.rewards, episode), episode),
    )


def _turn_rewards(episode: Episode) -> list[float]:
    return [turn.reward or 0.0 for turn in episode.turns]


def _turn_of_token(episode: Episode) -> NDArray[np.int32]:  # [sampled]
    turns = [segment.turns[segment.loss_mask] for segment in episode.segments]
    return turns[0] if len(turns) == 1 else np.concatenate([_NO_TOKENS, *turns])


def _sorted_turns(episode: Episode) -> NDArray[np.int32]:  # [sampled]
    turns = _turn_of_token(episode)
    return turns if len(episode.segments) == 1 else np.sort(turns)


def _order_of_turns(episode: Episode) -> NDArray[np.int64] | None:  # [sampled]
    """Return where the sampled tokens are in the segments, in the order of the turns; None: in the same order. A
    program may continue an earlier segment after it began another."""
    return None if len(episode.segments) == 1 else np.argsort(_turn_of_token(episode), kind="stable")


def _to_turns(values: NDArray[np.float64] | None, episode: Episode) -> NDArray[np.float64] | None:
    """Reorder a value of each sampled token, from the order of the segments to that of the turns."""
    order = None if values is None else _order_of_turns(episode)
    return values if values is None or order is None else values[order]


def _to_segments(values: NDArray[np.float64], episode: Episode) -> NDArray[np.float64]:
    """Do the reverse of _to_turns."""
    order = _order_of_turns(episode)
    if order is None:
        return values
    reordered = np.empty_like(values)
    reordered[order] = values
    return reordered


def _reference_kl(episode: Episode, facts: Sequence[TokenFacts]) -> NDArray[np.float64] | None:  # [sampled]
    parts = [
        (segment.logprobs.astype(np.float64) - found.reference_logprobs)[segment.loss_mask]
        for segment, found in zip(episode.segments, facts, strict=True)
        if found.reference_logprobs is not None
    ]
    return np.concatenate(parts) if parts else None


def _values(episode: Episode, facts: Sequence[TokenFacts]) -> NDArray[np.float64] | None:  # [sampled]
    parts = [
        found.values[segment.loss_mask].astype(np.float64)
        for segment, found in zip(episode.segments, facts, strict=True)
        if found.values is not None
    ]
    return np.concatenate(parts) if parts else None


def _rows_of(
    episode: Episode, given: EpisodeAdvantages | None, settings: Settings, facts: Sequence[TokenFacts]
) -> list[TrainRow]:
    num_sampled = episode.num_sampled
    limit = episode.sampling.max_tokens or settings.max_tokens
    weight = {"token": 1.0, "sequence": 1 / max(1, num_sampled), "constant": 1 / limit}[settings.level]
    rows, start, top = [], 0, find_top(settings.top_teachers, episode)
    advantages = None if given is None else _to_segments(given.advantages, episode)
    targets = None if given is None or given.returns is None else _to_segments(given.returns, episode)
    for segment, found in zip(episode.segments, facts, strict=True):
        mask = segment.loss_mask
        part = slice(start, start := start + int(np.count_nonzero(mask)))
        returns = None if targets is None else _spread(targets[part], mask)
        rows.append(
            TrainRow(
                token_ids=segment.token_ids,
                loss_mask=np.zeros_like(mask) if advantages is None else mask,
                rollout_logprobs=segment.logprobs,
                advantages=_spread(0.0 if advantages is None else advantages[part], mask),
                versions=segment.versions,
                weight=weight,
                temperature=episode.sampling.temperature or 1.0,  # greedy answers have no distribution
                episode=episode.group * _MAX_GROUP_SIZE + episode.position,
                reference_logprobs=found.reference_logprobs,
                returns=returns,
                values=found.values,
                top=None if top is None else top[part],
            )
        )
    return rows


def _spread(sampled: NDArray[np.float64] | float, mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Put a value for each sampled token where it is sampled; 0 elsewhere.  [sampled] -> [tokens]"""
    values = np.zeros(len(mask), np.float32)
    values[mask] = sampled
    return values
