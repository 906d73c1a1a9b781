"""What is known of a head that answers, answers late, or is gone."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

from rljob_api.run.trajectories import RecentSamples
from rljob_api.wire.driver_status import DriverStatus
from rljob_cli.run.endpoint import Endpoint
from rljob_cli.ui import runs as module
from rljob_cli.ui.runs import Head


class Session:
    """Answers as a head, or raises `error`."""

    error: Exception | None = None

    @asynccontextmanager
    async def get(self, url, **_):
        if self.error:
            raise self.error
        answer = DriverStatus(step=3) if url.endswith("/status") else RecentSamples(feed="f", next=0)

        async def read():
            return answer.model_dump_json()

        yield SimpleNamespace(status=200, read=read)


async def test_a_head_that_answers_late_keeps_its_status_for_a_while(monkeypatch):
    session, head = Session(), Head(lambda: Endpoint("http://head", "t"))
    await head.refresh(session)
    assert head.status.step == 3
    session.error = TimeoutError()
    await head.refresh(session)
    assert head.status.step == 3
    monkeypatch.setattr(module, "_BUSY_SECONDS", -1.0)
    await head.refresh(session)
    assert head.status is None


async def test_a_head_that_is_gone_has_no_status():
    session, head = Session(), Head(lambda: Endpoint("http://head", "t"))
    await head.refresh(session)
    session.error = ConnectionRefusedError()
    await head.refresh(session)
    assert head.status is None
