"""The objects of a run on one machine."""

import asyncio

import pytest

from rljob_api.manifest.job import RLJob
from rljob_cli.local.store import LocalStore

SPEC = {
    "model": {"source": "/m"},
    "data": {"train": {"source": "/t"}},
    "rewards": [{"name": "r", "function": {"inline": "x"}}],
}


@pytest.mark.parametrize("num_turns", range(5))
async def test_a_watch_that_is_cancelled_just_when_something_changes_ends(num_turns):
    """Or it has yielded before: a cancellation that is lost in between would keep `rljob run` from ending."""
    store = LocalStore(RLJob.model_validate({"metadata": {"name": "t"}, "spec": SPEC}))
    has_begun = asyncio.Event()

    async def follow():
        async for _ in store.watch():
            has_begun.set()

    following = asyncio.create_task(follow())
    await has_begun.wait()
    await asyncio.sleep(0)
    store.changed()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    following.cancel()
    done, _ = await asyncio.wait((following,), timeout=10)
    assert done
    assert following.cancelled()
