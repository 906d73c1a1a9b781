"""The samples that were scored last."""

from rljob_inputs.prompts import Prompt
from rljob_trainer.driver import reports
from rljob_trainer.driver.reports import RecentSampleLog
from rljob_trainer.episodes.types import EpisodeFailure, Group, ScoredResult
from tests.support.episodes import episode


def record(log, number, text="answer", **fields):
    log.record(
        "train",
        3,
        Group(0, Prompt(0, [{"role": "user", "content": "?"}], [1], ground_truth=4)),
        episode(text=text, index=(0, 0, number), **fields),
    )


def test_samples_after_a_cursor_are_returned_and_old_ones_dropped(monkeypatch):
    monkeypatch.setattr(reports, "_MAX_SAMPLES", 4)
    log = RecentSampleLog()
    assert (log.read(0).next, log.read(0).samples) == (0, [])
    for number in range(6):
        record(log, number)
    for after, numbers in ((0, [2, 3, 4, 5]), (4, [4, 5]), (6, []), (99, [])):
        found = log.read(after)
        assert ([row.sample for row in found.samples], found.next) == (numbers, 6)
    assert log.read(0).feed != RecentSampleLog().read(0).feed, "numbers of another head begin again"


def test_sample_has_its_rewards_with_latency_and_reason():
    log = RecentSampleLog()
    late = ScoredResult(id="x", valid=False, reason="timeout", message="killed", attempts=3, latency_seconds=90.0)
    record(log, 0, results={"judge": late})
    [row] = log.read(0).samples
    assert (row.step, row.lane, row.prompt, row.ground_truth) == (3, "train", '[{"role": "user", "content": "?"}]', "4")
    [result] = row.rewards
    assert (result.name, result.reason, result.latency_seconds, result.attempts) == ("judge", "timeout", 90.0, 3)


def test_long_texts_lack_their_middle_and_half_a_character_is_replaced():
    log = RecentSampleLog()
    record(
        log, 0, text="begin" + "x" * 100_000 + "\ud800end", failure=EpisodeFailure("user", "u", "timeout", "y" * 9000)
    )
    [row] = log.read(0).samples
    assert row.completion.startswith("begin")
    assert row.completion.endswith("?end")
    assert max(len(row.completion), len(row.failure)) < 1_100
    log.read(0).model_dump_json()
