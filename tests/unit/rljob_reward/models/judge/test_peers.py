"""Looking who shares the limits, for as long as the server lives."""

from __future__ import annotations

import asyncio

from rljob_api.wire.contract import ENV_HOSTS_FILE, ENV_PEERS, ENV_POD_IP
from rljob_reward.models.judge import peers
from rljob_reward.models.judge.peers import Peers
from rljob_reward.models.judge.shares import Share


async def test_a_look_up_that_fails_is_not_the_last_one(monkeypatch):
    monkeypatch.setenv(ENV_PEERS, "judge")
    monkeypatch.setenv(ENV_POD_IP, "10.0.0.1")
    monkeypatch.setenv(ENV_HOSTS_FILE, "/hosts")
    monkeypatch.setattr(peers, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(peers, "_FILE_PROPAGATION_SECONDS", 0.5)
    failures = iter([OSError(24, "Too many open files"), UnicodeError("label too long")])

    def resolve(host: str) -> list[str]:
        for failure in failures:
            raise failure
        return ["10.0.0.1"]

    monkeypatch.setattr(peers, "resolve", resolve)
    shared = asyncio.Event()
    looking = Peers(1.0, lambda share: shared.set() if share == Share(0, 1) else None)
    looking.start()
    async with asyncio.timeout(60):
        await shared.wait()
    await looking.close()
