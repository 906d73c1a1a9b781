"""The policy as its own teacher: what it reads, and what becomes of its log-probs."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from rljob_api.manifest.job_sections import Data
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreRequest, TokenSegment
from rljob_trainer.algorithms.teachers import find_top, score_by_teacher
from rljob_trainer.episodes.types import Episode, Segment, told_dtype
from rljob_trainer.outages import Outages
from rljob_trainer.replicas.http import open_session
from rljob_trainer.rewards.hinted import HintedPolicy

BOS = 1
REWARD = Reward(name="self", teacher={"hint": "{a}!"}, use="training")
DATA = Data(train={"source": "d.jsonl"}, format="text")
SEGMENTS = [
    TokenSegment(token_ids=[BOS, 20, 30, 31, 40, 32, 50], sampled=[(2, 4), (5, 6)]),
    TokenSegment(token_ids=[BOS, 20, 41], sampled=[]),
    TokenSegment(token_ids=[21, 33], sampled=[(1, 2)]),
]
ROW = {"answer_column": "a", "ground_truth": "4", "data_source": "d.jsonl", "extra_info": {"index": 6}}


class Tokenizer:
    bos_token_id = BOS

    def __call__(self, texts):
        return {"input_ids": [[BOS, *(100 + ord(each) for each in text)] for text in texts]}


class Rollouts:
    """The log-prob of a token is minus its id."""

    def __init__(self, answer=None):
        self.asked, self._answer = [], answer or (lambda ids: -np.array(ids[1:], np.float32))
        self.replicas = SimpleNamespace(fleet=SimpleNamespace(health=Outages().watch("spec.rollout", "")))

    async def score(self, token_ids, top_k=0):
        self.asked.append(token_ids)
        self.top_k = top_k
        return self._answer(token_ids)


async def ask(rollouts, reward=REWARD, **fields):
    async with open_session() as session:
        client = HintedPolicy(rollouts, DATA, reward, session, Tokenizer(), index=2)
        given = {"id": "g/0", "prompt": "q", "completion": "x", "segments": SEGMENTS, **ROW, **fields}
        return (await client.score(ScoreRequest.model_validate(given)))[0], client


def episode_of(segments):
    return Episode(0, 0, 0, [as_segment(each) for each in segments])


def as_segment(given):
    mask = np.zeros(len(given.token_ids), bool)
    for start, end in given.sampled:
        mask[start:end] = True
    return Segment(given.token_ids, mask, np.where(mask, -30.0, 0.0), np.where(mask, 0, -1), np.where(mask, 0, -1))


async def test_it_reads_the_hint_and_then_what_the_policy_saw():
    """A token that begins a text is there once; what follows the last sampled token is cut."""
    rollouts = Rollouts()
    result, client = await ask(rollouts)
    hint = [BOS, 100 + ord("4"), 100 + ord("!")]
    assert rollouts.asked == [[*hint, 20, 30, 31, 40, 32], [*hint, 21, 33]]
    read = score_by_teacher(REWARD.teacher, result, episode_of(SEGMENTS))
    assert read.valid
    assert read.score == pytest.approx(-np.mean([0.0, 1.0, 2.0, 3.0])), "log pi is -30 for each"
    assert client.load().latency_seconds is not None, "it is measured as every reward"


async def test_with_top_k_it_asks_for_the_likeliest_tokens():
    def answer(ids):
        return np.array([(-each, [(each, -0.5), (9, least)]) for each in ids[1:]], told_dtype(2))

    least, reward = -1.0, Reward(name="self", teacher={"hint": "{a}!", "topK": 2}, use="training")
    result, _ = await ask(rollouts := Rollouts(answer), reward)
    assert rollouts.top_k == 2
    ended = episode_of(SEGMENTS)
    ended.results = {"self": score_by_teacher(reward.teacher, result, ended)}
    assert find_top([reward], ended)["token"][:, 0].tolist() == [[30, 9], [31, 9], [32, 9], [33, 9]]
    least = -np.inf
    assert (await ask(Rollouts(answer), reward))[0].reason == InvalidReason.NOT_FINITE


async def test_a_refused_or_broken_answer_is_invalid_and_ends_a_job_that_wants_that():
    result, _ = await ask(Rollouts(lambda ids: None))
    assert (result.valid, result.reason) == (False, InvalidReason.EXCEPTION)
    assert "the rollouts refuse the episode after the hint; see" in result.message
    result, _ = await ask(Rollouts(lambda ids: np.full(len(ids) - 1, -np.inf)))
    assert (result.valid, result.reason) == (False, InvalidReason.NOT_FINITE)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer_column": "b"}, r"\{a\} is not a column; row 7 of d.jsonl has index, b"),
        ({"extra_info": {"index": "q7"}, "ground_truth": None}, "row q7 of d.jsonl has nothing in a"),
        ({"ground_truth": None}, "row 7 of d.jsonl has nothing in a; fill it in, or leave out such rows with teacher"),
    ],
)
async def test_a_row_without_a_hint_is_named(row, message):
    result, _ = await ask(Rollouts(), **row)
    assert (result.valid, result.reason) == (False, InvalidReason.EXCEPTION)
    assert re.match(f"spec.rewards\\[2\\].teacher.hint: {message}", result.message)
