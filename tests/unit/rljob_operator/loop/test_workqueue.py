"""The queue by itself, with a clock that tests move; then the loop over a backend that counts."""

import asyncio
import time

import pytest

from rljob_api.errors import TransientError
from rljob_operator.backend import JobKey
from rljob_operator.loop import workqueue as queue_module
from rljob_operator.loop.workqueue import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, KeyedQueue, backoff_seconds, run

A, B = JobKey("ns", "a"), JobKey("ns", "b")


@pytest.fixture
def queue():
    return KeyedQueue()


def test_a_key_added_twice_is_taken_once(queue):
    queue.add(A)
    queue.add(A)
    assert (queue.take(0), queue.take(0)) == (A, None)


def test_a_key_added_while_it_is_worked_on_is_taken_again_only_afterwards(queue):
    queue.add(A)
    queue.take(0)
    queue.add(A)
    assert queue.take(0) is None, "never twice at once"
    queue.finish(A)
    assert queue.take(0) == A


def test_keys_are_taken_in_the_order_in_which_they_came(queue):
    queue.add(B)
    queue.add(A)
    assert (queue.take(0), queue.take(0)) == (B, A)


def test_a_later_key_waits_for_its_time_and_the_earliest_time_counts(queue):
    queue.add_at(A, 9.0)
    queue.add_at(A, 5.0)
    queue.add_at(A, 7.0)
    assert (queue.take(4.9), queue.next_due()) == (None, 5.0)
    assert queue.take(5.0) == A
    queue.finish(A)
    assert (queue.take(100.0), queue.next_due()) == (None, None), "the other times were for the same look"


def test_a_look_upon_a_change_replaces_the_one_that_was_due_later(queue):
    queue.add_at(A, 5.0)
    queue.add(A)
    assert queue.take(1.0) == A
    assert queue.next_due() is None


def test_changes_right_after_a_look_are_looked_at_together_and_none_is_lost():
    queue = KeyedQueue(seconds_between_looks=1.0)
    queue.add_changed(A, 0.0)
    assert queue.take(0.0) == A, "the first at once"
    queue.add_changed(A, 0.1)
    queue.finish(A)
    queue.add_changed(A, 0.5)
    queue.add_changed(B, 0.5)
    assert (queue.take(0.9), queue.take(0.9), queue.next_due()) == (B, None, 1.0), "another key waits for nobody"
    assert queue.take(1.0) == A
    queue.add_changed(A, 2.5)
    assert queue.take(2.5) is None, "never twice at once"
    queue.finish(A)
    assert queue.take(2.5) == A, "it had changed while it was looked at"
    queue.finish(A)
    queue.add_changed(A, 9.0)
    assert queue.take(9.0) == A


def test_a_queue_that_was_told_nothing_acts_on_each_change_at_once(queue):
    for now in (0.0, 0.1):
        queue.add_changed(A, now)
        assert queue.take(now) == A
        queue.finish(A)


def test_failures_wait_longer_each_time_and_success_forgets_them(queue):
    delays = []
    now = 0.0
    queue.add(A)
    for _ in range(3):
        assert queue.take(now) == A
        delays.append(queue.fail(A, now))
        now += delays[-1]
    assert delays == [FIRST_BACKOFF_SECONDS, 2 * FIRST_BACKOFF_SECONDS, 4 * FIRST_BACKOFF_SECONDS]
    queue.take(now)
    queue.finish(A)
    queue.add(A)
    queue.take(now)
    assert queue.fail(A, now) == FIRST_BACKOFF_SECONDS


def test_the_backoff_has_an_end():
    assert backoff_seconds(1000) == MAX_BACKOFF_SECONDS


def test_a_failing_key_holds_up_no_other(queue):
    queue.add(A)
    queue.take(0)
    queue.fail(A, 0)
    queue.add(B)
    assert queue.take(0) == B


class Looks:
    """Stands in for reconcile: what happens on each look at a key."""

    def __init__(self, monkeypatch, outcomes):
        self.outcomes, self.seen, self.at_once, self.most_at_once = outcomes, [], set(), 0
        self.changed = asyncio.Condition()
        monkeypatch.setattr(queue_module, "reconcile", self.look)

    async def wait_for(self, number):
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.seen) >= number)

    async def look(self, backend, key, now):
        assert key not in self.at_once, "two looks at one job at once"
        self.at_once.add(key)
        self.most_at_once = max(self.most_at_once, len(self.at_once))
        await asyncio.sleep(0)
        self.at_once.discard(key)
        self.seen.append(key)
        async with self.changed:
            self.changed.notify_all()
        outcome = self.outcomes.get(key, []).pop(0) if self.outcomes.get(key) else None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Watch:
    """A backend of which only the watch is used; it stays open until enough looks were seen."""

    def __init__(self, looks, keys, until, breaks=0):
        self.looks, self.keys, self.until, self.breaks, self.begun = looks, keys, until, breaks, 0

    async def watch(self):
        self.begun += 1
        for key in self.keys:
            yield key
        if self.breaks:
            self.breaks -= 1
            raise TransientError("410 Gone")
        await self.looks.wait_for(self.until)


async def run_until_done(backend, **kwargs):
    await asyncio.wait_for(run(backend, **kwargs), timeout=20)


async def test_every_key_of_the_watch_is_looked_at_and_the_loop_ends_with_it(monkeypatch):
    looks = Looks(monkeypatch, {})
    await run_until_done(Watch(looks, [A, B, A], until=0), workers=2)
    assert set(looks.seen) == {A, B}
    assert looks.most_at_once == 2, "workers work side by side"


async def test_a_failed_look_is_tried_again_by_itself(monkeypatch, caplog):
    monkeypatch.setattr(queue_module, "FIRST_BACKOFF_SECONDS", 0.001)
    looks = Looks(monkeypatch, {A: [TransientError("conflict"), RuntimeError("a defect")]})
    await run_until_done(Watch(looks, [A], until=3), workers=2)
    assert looks.seen == [A, A, A]
    assert "ns/a: conflict" in caplog.text
    assert "a defect" in caplog.text, "a defect is loud"


async def test_a_look_that_asks_for_another_gets_it(monkeypatch):
    looks = Looks(monkeypatch, {A: [0.0, 0.001]})
    await run_until_done(Watch(looks, [A], until=3), workers=1)
    assert looks.seen == [A, A, A]


async def test_a_broken_watch_is_begun_again(monkeypatch):
    monkeypatch.setattr(queue_module, "_WATCH_BACKOFF_SECONDS", 0.0)
    looks = Looks(monkeypatch, {})
    watch = Watch(looks, [A], until=2, breaks=1)
    await run_until_done(watch, workers=1)
    assert watch.begun == 2


async def test_cancelling_the_loop_leaves_no_task_behind(monkeypatch):
    looks = Looks(monkeypatch, {})
    task = asyncio.create_task(run(Watch(looks, [A], until=10**9), workers=3))
    await asyncio.wait_for(looks.wait_for(1), timeout=20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("reconcile-")]


@pytest.mark.parametrize("num_turns", range(3, 40))
async def test_run_ends_when_it_is_cancelled_whatever_its_workers_wait_for(num_turns):
    """A replica that has lost the lead ends by this."""

    class Busy:
        async def watch(self):
            while True:
                yield JobKey("ns", "job")
                await asyncio.sleep(0)

    async def reconcile_key(backend, key, now):
        return 0.001

    running = asyncio.create_task(run(Busy(), workers=4, reconcile_key=reconcile_key))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=30)
    assert done, "a worker has lost its cancellation"


async def test_a_watch_ends_with_its_feed_also_when_that_was_busy_with_a_key():
    """Python leaves a generator of which no more is asked to the collector of garbage: its tasks would go on."""

    class Backend:
        has_ended = False

        async def watch(self):
            try:
                yield A
            finally:
                for _ in range(10):
                    await asyncio.sleep(0)
                self.has_ended = True

    backend, changed = Backend(), asyncio.Condition()
    async with changed:  # so the feed waits with a key in its hands
        feeding = asyncio.create_task(queue_module._feed(backend, KeyedQueue(), changed, time.monotonic))
        for _ in range(10):
            await asyncio.sleep(0)
        feeding.cancel()
        await asyncio.wait([feeding])
    assert backend.has_ended
