"""The objects of a run on one machine."""

import asyncio

import pytest

from rljob_api.manifest.job import RLJob
from rljob_cli.local.store import LocalStore
from rljob_cli.run.snapshot import RunHistory
from tests.support.waiting import DEADLINE_SECONDS

SPEC = {
    "model": {"source": "/m"},
    "data": {"train": {"source": "/t"}},
    "rewards": [{"name": "r", "function": {"inline": "x"}}],
}


@pytest.mark.parametrize("num_iterations", range(5))
async def test_watch_ends_when_cancelled_during_a_change(num_iterations):
    """A cancellation that is lost at any point of the change would keep `rljob run` from ending."""
    store = LocalStore(RLJob.model_validate({"metadata": {"name": "t"}, "spec": SPEC}))
    has_started = asyncio.Event()

    async def follow():
        async for _ in store.watch():
            has_started.set()

    following = asyncio.create_task(follow())
    await has_started.wait()
    await asyncio.sleep(0)
    store.changed()
    for _ in range(num_iterations):
        await asyncio.sleep(0)
    following.cancel()
    done, _ = await asyncio.wait((following,), timeout=DEADLINE_SECONDS)
    assert done
    assert following.cancelled()


def test_failed_pod_that_is_deleted_at_once_still_counts_as_a_restart():
    store = LocalStore(RLJob.model_validate({"metadata": {"name": "t"}, "spec": SPEC}))
    labels = {"rljob.dev/role": "head"}
    ended = {"reason": "Error", "exitCode": 137, "finishedAt": "t", "message": "killed"}
    container = {"name": "head", "restartCount": 0, "state": {"terminated": ended}}
    store.create_pod({"metadata": {"name": "t-head-0", "labels": labels}})
    store.set_pod_status("t-head-0", {"phase": "Failed", "containerStatuses": [container]})
    store.delete_pod("t-head-0")
    store.remove_pod("t-head-0")
    history = RunHistory()
    history.record([*store.failed_pods, *store.pods.values()])
    assert history.restarts == {"head": 1}
    assert [failure.message for failure in history.failures] == ["killed"]
