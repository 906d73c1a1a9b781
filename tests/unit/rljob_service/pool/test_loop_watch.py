"""Whether the event loop of a shared process turns."""

from __future__ import annotations

from rljob_service.pool.loop_watch import LoopWatch


def test_loop_that_beats_turns() -> None:
    watch = LoopWatch()
    watch.start(0.0)
    assert [watch.observe(beats, float(beats)) for beats in range(1, 30)] == [0.0] * 29


def test_loop_without_a_beat_is_late_for_as_long() -> None:
    watch = LoopWatch()
    watch.start(100.0)
    watch.observe(5, 101.0)
    assert watch.observe(5, 109.0) == 8.0
    assert watch.is_late(5, 109.0)
    assert not watch.is_late(6, 109.5)


def test_loop_without_requests_is_never_late() -> None:
    watch = LoopWatch()
    watch.start(0.0)
    watch.observe(5, 1.0)
    watch.stop()
    assert watch.observe(5, 1000.0) == 0.0
    watch.start(2000.0)
    assert watch.observe(5, 2001.0) == 1.0, "its last beat was before it had no requests"
