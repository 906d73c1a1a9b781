"""Rows, advantages and a step's counts of random conversations, against sums over single tokens in plain Python."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from rljob_inputs.prompts import Prompt
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.algorithms.rows import build_rows, denominator, episode_rewards, record_advantages
from rljob_trainer.episodes.types import (
    NOT_SAMPLED,
    Completion,
    Episode,
    Group,
    ScoredResult,
    TokenFacts,
    Turn,
    empty_segment,
)
from rljob_trainer.history.metrics import count_staleness, summarize_episodes
from tests.support.algorithms import algorithm_spec


class Plain:
    """One episode, token by token."""

    def __init__(self, draw: random.Random, group: int, sample: int) -> None:
        self.segments: list[list[tuple[int, float, int, int]]] = []
        """[segments][tokens] id, log-prob, version and turn; a turn of -1 was not sampled."""
        self.num_turns = draw.randint(1, 5)
        self.is_valid = draw.random() < 0.8
        self.score = draw.choice([0.0, 0.5, 1.0, 0.1]) if self.is_valid else None
        self.rewards = [draw.choice([None, None, 0.25]) for _ in range(self.num_turns)]
        self.index = (group, sample)
        version = draw.randint(0, 3)
        for turn in range(self.num_turns):
            is_new = not self.segments or draw.random() < 0.3
            segment = [] if is_new else draw.choice(self.segments)  # a program may continue an earlier one
            self.segments += [segment] if is_new else []
            segment += [(draw.randint(0, 9), 0.0, NOT_SAMPLED, -1) for _ in range(draw.randint(1, 4))]
            for _ in range(draw.randint(1, 40)):
                version += draw.random() < 0.02
                segment.append((draw.randint(0, 200_000), float(np.float32(-draw.expovariate(1))), version, turn))

    def build(self) -> Episode:
        """Return it as the agent loops build it: completion by completion."""
        built = []
        for tokens in self.segments:
            segment, start = empty_segment(), 0
            while start < len(tokens):
                turn = tokens[start][3]
                end = next((i for i in range(start, len(tokens)) if tokens[i][3] != turn), len(tokens))
                ids, logprobs, versions, _ = map(list, zip(*tokens[start:end], strict=True))
                if turn < 0:
                    segment.append_context(ids)
                else:
                    segment.append_sampled(Completion(ids, logprobs, versions, "", False), turn)
                start = end
            built.append(segment)
        reason = None if self.is_valid else "timeout"
        result = ScoredResult(id="x", valid=self.is_valid, score=self.score, reason=reason)
        turns = [Turn("", reward=reward) for reward in self.rewards]
        return Episode(self.index[0], *self.index, built, turns, results={"r0": result}, score=self.score)

    @property
    def sampled(self) -> list[tuple[int, float, int, int]]:
        return [token for segment in self.segments for token in segment if token[3] >= 0]


def draw_groups(seed: int) -> list[list[Plain]]:
    draw = random.Random(seed)
    groups = [[Plain(draw, group, sample) for sample in range(4)] for group in range(draw.randint(1, 4))]
    if seed % 2:
        for plain in (plain for group in groups for plain in group):
            plain.rewards = [None] * plain.num_turns
    return groups


def group_advantages(group: list[Plain]) -> list[float]:
    """Return GRPO's advantage of each episode without rewards of turns; 0 for one that is masked."""
    scores = [plain.score for plain in group if plain.score is not None]
    mean = math.fsum(scores) / len(scores) if scores else 0.0
    squares = math.fsum((score - mean) ** 2 for score in scores)
    std = math.sqrt(squares / (len(scores) - 1)) if len(scores) > 1 else 0.0
    return [0.0 if plain.score is None or std <= 1e-4 else (plain.score - mean) / std for plain in group]


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_those_of_single_tokens_bit_for_bit(seed: int) -> None:
    plain, algorithm = draw_groups(seed), build_algorithm(algorithm_spec(max_tokens=100))
    groups = [Group(number, Prompt(number, "p", [1]), [each.build() for each in of]) for number, of in enumerate(plain)]
    rewards = episode_rewards(groups, algorithm.settings)
    advantages = algorithm.advantages(rewards)
    rows = build_rows(groups, advantages, algorithm.settings)
    for group, of_group in enumerate(plain):
        remaining = iter(rows[group])
        for sample, (each, expected) in enumerate(zip(of_group, group_advantages(of_group), strict=True)):
            given = advantages[group][sample]
            assert (given is None) == (each.score is None)
            for tokens in each.segments:
                row = next(remaining)
                ids, logprobs, versions, turns = map(list, zip(*tokens, strict=True))
                is_trained = [turn >= 0 and each.score is not None for turn in turns]
                assert (row.token_ids.tolist(), row.versions.tolist()) == (ids, versions)
                assert (row.rollout_logprobs.tolist(), row.loss_mask.tolist()) == (logprobs, is_trained)
                if seed % 2:  # without rewards of turns, all tokens of an episode have the same advantage
                    one = float(np.float32(expected))
                    assert row.advantages.tolist() == [one if trained else 0.0 for trained in is_trained]
            check_means(groups[group].episodes[sample], rewards[group][sample], given, each)
    trained = [each for group in plain for each in group if each.score is not None]
    assert denominator(groups, algorithm.settings) == sum(len(each.sampled) for each in trained)


def check_means(episode, rewards, given, plain) -> None:
    """The means of an episode and its turns are those of its tokens, which it has in the order of its turns."""
    record_advantages(episode, rewards, given)
    values = [] if given is None else given.advantages.tolist()
    turns = sorted(token[3] for token in plain.sampled)
    assert episode.advantage == (float(np.array(values).mean()) if values else None)
    for number, turn in enumerate(episode.turns):
        of_turn = [value for value, owner in zip(values, turns, strict=False) if owner == number]
        assert turn.advantage == (float(np.array(of_turn).mean()) if of_turn else None)


@pytest.mark.parametrize("seed", range(6))
def test_counts_of_a_step_are_those_of_single_tokens(seed: int) -> None:
    plain = [each for group in draw_groups(seed) for each in group]
    episodes = [each.build() for each in plain]
    expected = Counter(5 - token[2] for each in plain for token in each.sampled)
    assert count_staleness(episodes, 5) == expected
    assert summarize_episodes(episodes).response_tokens_mean == sum(len(each.sampled) for each in plain) / len(plain)
    for episode, each in zip(episodes, plain, strict=True):
        versions = [token[2] for token in each.sampled]
        assert episode.versions == (min(versions), max(versions))


@pytest.mark.parametrize("seed", range(6))
def test_what_the_trainer_inspected_is_in_the_order_of_turns(seed: int) -> None:
    plain = draw_groups(seed)
    spec = algorithm_spec(max_tokens=100, kl={"coefficient": 0.1, "estimator": "k1"})
    algorithm, draw = build_algorithm(spec), random.Random(seed)
    groups = [Group(number, Prompt(number, "p", [1]), [each.build() for each in of]) for number, of in enumerate(plain)]
    reference = [
        np.array([-draw.random() if token[3] >= 0 else 0.0 for token in tokens], np.float32)
        for of in plain
        for each in of
        for tokens in each.segments
    ]
    rewards = episode_rewards(groups, algorithm.settings, [TokenFacts(reference_logprobs=each) for each in reference])
    remaining = iter(reference)
    for of_plain, of_rewards in zip(plain, rewards, strict=True):
        for each, found in zip(of_plain, of_rewards, strict=True):
            pairs = [pair for tokens in each.segments for pair in zip(tokens, next(remaining), strict=True)]
            sampled = sorted((pair for pair in pairs if pair[0][3] >= 0), key=lambda pair: pair[0][3])
            if found is not None:
                assert found.turn_of_token.tolist() == [token[3] for token, _ in sampled]
                assert found.reference_kl.tolist() == [token[1] - float(value) for token, value in sampled]
