"""The queue alone, with a clock that tests move; then the workers, with a reconcile that counts."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.errors import TransientError
from rljob_core.backend import ForbiddenError, JobKey
from rljob_core.loop import workqueue
from rljob_core.loop.workqueue import INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, WorkQueue, backoff_seconds, run
from tests.support.waiting import DEADLINE_SECONDS

A, B = JobKey("ns", "a"), JobKey("ns", "b")


@pytest.fixture
def queue():
    return WorkQueue()


def test_key_added_twice_is_taken_once(queue):
    queue.add(A)
    queue.add(A)
    assert (queue.take(0), queue.take(0)) == (A, None)


def test_key_added_during_its_reconcile_is_taken_again_afterwards(queue):
    queue.add(A)
    queue.take(0)
    queue.add(A)
    assert queue.take(0) is None, "never twice concurrently"
    queue.finish(A)
    assert queue.take(0) == A


def test_keys_are_taken_in_order_of_arrival(queue):
    queue.add(B)
    queue.add(A)
    assert (queue.take(0), queue.take(0)) == (B, A)


def test_namespaces_take_turns(queue):
    for number in range(1000):
        queue.add(JobKey("busy", f"{number}"))
    queue.add(JobKey("other", "a"))
    queue.add(JobKey("third", "a"))
    queue.add(JobKey("third", "b"))
    taken = [queue.take(0) for _ in range(6)]
    assert [key.namespace for key in taken] == ["busy", "other", "third", "busy", "third", "busy"]
    assert [key.name for key in taken if key.namespace == "busy"] == ["0", "1", "2"], "in order of arrival"
    assert queue.depth == 997


def test_namespace_has_at_most_its_number_of_keys_in_work(queue):
    for number in range(5):
        queue.add(JobKey("busy", f"{number}"))
    assert [queue.take(0, 2).name for _ in range(2)] == ["0", "1"]
    assert queue.take(0, 2) is None
    queue.add(JobKey("other", "a"))
    assert queue.take(0, 2) == JobKey("other", "a"), "whatever the other namespace waits for"
    queue.finish(JobKey("busy", "1"))
    assert queue.take(0, 2) == JobKey("busy", "2")


def test_keys_that_did_not_fail_come_before_retries(queue):
    queue.add(A)
    queue.take(0)
    queue.fail(A, 0)
    queue.add(A)
    queue.add(B)
    assert (queue.take(1), queue.take(1)) == (B, A)
    queue.finish(A)
    queue.finish(B)
    queue.add(A)
    queue.add(B)
    assert (queue.take(2), queue.take(2)) == (A, B), "a success ends it"


def test_of_the_keys_without_an_answer_one_is_tried_at_a_time(queue):
    slow = [JobKey("slow", f"{number}") for number in range(4)]
    for key in slow:
        queue.add(key)
        assert queue.take(0) == key, "before the first failure nothing is known"
    for key in slow:
        queue.fail(key, 0, is_unanswered=key != slow[3])
    assert [queue.take(1) for _ in range(3)] == [slow[0], slow[3], None], "another error delays no key"
    assert queue.oldest_age(10_000) == 0, "they do not wait for workers"
    queue.add(JobKey("slow", "new"))
    queue.add(JobKey("fast", "a"))
    assert {queue.take(1), queue.take(1)} == {JobKey("slow", "new"), JobKey("fast", "a")}
    assert queue.take(1) is None
    queue.fail(slow[0], 1, is_unanswered=True)
    assert queue.take(1) == slow[1]
    queue.finish(slow[1])
    assert queue.take(1) == slow[2]


async def test_hung_reconciles_of_one_namespace_leave_workers_to_others():
    """Those of `slow` hang until all of `fast` have ended, twice: as new keys and as retries."""
    may_answer, ended, most = asyncio.Event(), list[str](), 0
    hung = set[JobKey]()

    async def watch():
        for number in range(20):
            yield JobKey("slow", f"{number}")
        for number in range(3):
            yield JobKey("fast", f"{number}")
        await may_answer.wait()

    async def reconcile(key, now):
        nonlocal most
        if key.namespace == "slow":
            hung.add(key)
            most = max(most, len(hung))
            await may_answer.wait()
            hung.discard(key)
        ended.append(key.namespace)
        if ended.count("fast") == 3:
            may_answer.set()

    async with asyncio.timeout(DEADLINE_SECONDS):
        await run(watch, reconcile, workers=4)
    assert ended[:3] == ["fast"] * 3
    assert (most, ended.count("slow")) == (4, 20)


@given(st.lists(st.one_of(st.tuples(st.sampled_from("abc"), st.integers(0, 20)), st.none())))
def test_waiting_key_is_delayed_by_its_own_namespace_and_one_turn_of_each_other(steps):
    """A tuple adds a key, None takes one. Each key is taken once, at the latest when its turn says."""
    queue, latest, num_taken = WorkQueue(), dict[JobKey, int](), 0
    for step in [*steps, *[None] * len(steps)]:
        if step is not None:
            key = JobKey(step[0], str(step[1]))
            ahead = sum(other.namespace == key.namespace for other in latest)
            latest.setdefault(key, num_taken + 3 * (ahead + 1))
            queue.add(key)
        elif key := queue.take(0):
            num_taken += 1
            assert num_taken <= latest.pop(key)
            queue.finish(key)
    assert not latest
    assert queue.is_idle


def test_delayed_key_is_due_at_its_earliest_time(queue):
    queue.add_at(A, 9.0)
    queue.add_at(A, 5.0)
    queue.add_at(A, 7.0)
    assert (queue.take(4.9), queue.next_due()) == (None, 5.0)
    assert queue.take(5.0) == A
    queue.finish(A)
    assert (queue.take(100.0), queue.next_due()) == (None, None), "the other times were for the same reconcile"


def test_reconcile_upon_a_change_replaces_the_delayed_one(queue):
    queue.add_at(A, 5.0)
    queue.add(A)
    assert queue.take(1.0) == A
    assert queue.next_due() is None


def test_changes_within_the_interval_are_taken_together_and_none_is_lost():
    queue = WorkQueue(min_interval_seconds=1.0)
    queue.add_changed(A, 0.0)
    assert queue.take(0.0) == A, "the first immediately"
    queue.add_changed(A, 0.1)
    queue.finish(A)
    queue.add_changed(A, 0.5)
    queue.add_changed(B, 0.5)
    assert (queue.take(0.9), queue.take(0.9), queue.next_due()) == (B, None, 1.0), "another key is not delayed"
    assert queue.take(1.0) == A
    queue.add_changed(A, 2.5)
    assert queue.take(2.5) is None, "never twice concurrently"
    queue.finish(A)
    assert queue.take(2.5) == A, "it had changed during its reconcile"
    queue.finish(A)
    queue.add_changed(A, 9.0)
    assert queue.take(9.0) == A


def test_queue_without_interval_takes_each_change_immediately(queue):
    for now in (0.0, 0.1):
        queue.add_changed(A, now)
        assert queue.take(now) == A
        queue.finish(A)


def test_backoff_doubles_and_resets_upon_success(queue):
    delays = []
    now = 0.0
    queue.add(A)
    for _ in range(3):
        assert queue.take(now) == A
        delays.append(queue.fail(A, now))
        now += delays[-1]
    assert delays == [INITIAL_BACKOFF_SECONDS, 2 * INITIAL_BACKOFF_SECONDS, 4 * INITIAL_BACKOFF_SECONDS]
    queue.take(now)
    queue.finish(A)
    queue.add(A)
    queue.take(now)
    assert queue.fail(A, now) == INITIAL_BACKOFF_SECONDS


def test_backoff_has_a_maximum():
    assert backoff_seconds(1000) == MAX_BACKOFF_SECONDS


def test_backoff_of_a_failure_may_be_shorter(queue):
    now = 0.0
    queue.add(A)
    for _ in range(10):
        queue.take(now)
        delay = queue.fail(A, now, 15.0)
        now += delay
    assert delay == 15.0


async def test_missing_reference_is_looked_for_again_sooner(monkeypatch):
    monkeypatch.setattr(workqueue, "INITIAL_BACKOFF_SECONDS", 60.0)
    reconciles = Reconciles({A: [ForbiddenError("x", retry_within_seconds=0.001)]}, until=2)
    await reconciles.run(workers=1)
    assert reconciles.seen == [A, A]


def test_failing_key_delays_no_other(queue):
    queue.add(A)
    queue.take(0)
    queue.fail(A, 0)
    queue.add(B)
    assert queue.take(0) == B


class Reconciles:
    """A reconcile with given outcomes, which counts, and a watch that stays open until `until` reconciles were seen."""

    def __init__(self, outcomes=None, until=0, keys=(A,), num_failures=0):
        self.outcomes, self.until, self.keys, self.num_failures = outcomes or {}, until, keys, num_failures
        self.seen, self.running, self.max_running, self.num_watches = [], set(), 0, 0
        self.changed = asyncio.Condition()

    async def wait_for(self, number):
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.seen) >= number)

    async def reconcile(self, key, now):
        assert key not in self.running, "two concurrent reconciles of one key"
        self.running.add(key)
        self.max_running = max(self.max_running, len(self.running))
        await asyncio.sleep(0)
        self.running.discard(key)
        self.seen.append(key)
        async with self.changed:
            self.changed.notify_all()
        outcome = self.outcomes.get(key, []).pop(0) if self.outcomes.get(key) else None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def watch(self):
        self.num_watches += 1
        for key in self.keys:
            yield key
        if self.num_failures:
            self.num_failures -= 1
            raise TransientError("410 Gone")
        await self.wait_for(self.until)

    async def run(self, workers=1):
        async with asyncio.timeout(DEADLINE_SECONDS):
            await run(self.watch, self.reconcile, workers=workers)


async def test_run_reconciles_every_key_and_ends_with_its_watch():
    reconciles = Reconciles(keys=[A, B, A])
    await reconciles.run(workers=2)
    assert set(reconciles.seen) == {A, B}
    assert reconciles.max_running == 2, "workers run concurrently"


async def test_failed_reconcile_is_retried_and_a_defect_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(workqueue, "INITIAL_BACKOFF_SECONDS", 0.001)
    reconciles = Reconciles({A: [TransientError("conflict"), RuntimeError("a defect")]}, until=3)
    await reconciles.run(workers=2)
    assert reconciles.seen == [A, A, A]
    assert "RLJob ns/a: conflict" in caplog.text
    assert "a defect" in caplog.text


async def test_reconcile_is_requeued_after_the_seconds_it_returns():
    reconciles = Reconciles({A: [0.0, 0.001]}, until=3)
    await reconciles.run()
    assert reconciles.seen == [A, A, A]


async def test_failed_watch_is_started_again(monkeypatch):
    monkeypatch.setattr(workqueue, "_WATCH_BACKOFF_SECONDS", 0.0)
    reconciles = Reconciles(until=2, num_failures=1)
    await reconciles.run()
    assert reconciles.num_watches == 2


async def test_cancelled_run_leaves_no_task():
    reconciles = Reconciles(until=10**9)
    task = asyncio.create_task(reconciles.run(workers=3))
    await reconciles.wait_for(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("reconcile-")]


@pytest.mark.parametrize("num_turns", range(3, 40))
async def test_run_ends_when_cancelled_whatever_its_workers_wait_for(num_turns):
    """A replica that lost its Lease ends by this."""

    async def watch():
        while True:
            yield JobKey("ns", "job")
            await asyncio.sleep(0)

    async def reconcile_key(key, now):
        return 0.001

    running = asyncio.create_task(run(watch, reconcile_key, workers=4))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=DEADLINE_SECONDS)
    assert done, "a worker has lost its cancellation"


async def test_watch_is_closed_when_its_feed_is_cancelled_with_a_key_in_hand():
    """Python leaves an unfinished generator to the garbage collector: its tasks would keep running."""
    ended, changed = [], asyncio.Condition()

    async def watch():
        try:
            yield A
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            ended.append(True)

    async with changed:  # the feed waits for it
        feeding = asyncio.create_task(workqueue._feed(watch, WorkQueue(), changed, time.monotonic))
        for _ in range(10):
            await asyncio.sleep(0)
        feeding.cancel()
        await asyncio.wait([feeding])
    assert ended
