"""The signal that ends an episode: it reaches whatever the program does, and lets it release what it holds."""

from __future__ import annotations

import signal

import pytest

from tests.support.agent_functions import play

_BEGIN = """
import asyncio, os, signal, socket, threading
done = []
def end_soon():
    os.kill(os.getpid(), signal.SIGTERM)
class Agent:
    def close(self):
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("close")
        with open(os.environ["RECORD"], "w") as file:
            file.write(" ".join(done))
"""
SYNC = """
    def run(self):
        try:
            end_soon()
            threading.Event().wait()
        finally:
            done.append("finally")
"""
WAITING = """
    async def run(self):
        try:
            asyncio.get_running_loop().call_soon(end_soon)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            done.append("finally")
"""
IN_ANOTHER_TASK = """
    async def run(self):
        try:
            asyncio.get_running_loop().call_soon(end_soon)
            await asyncio.gather(self.wait(), self.wait())
        finally:
            done.append("finally")
    async def wait(self):
        await asyncio.Event().wait()
"""
BLOCKING = """
    async def run(self):
        try:
            await asyncio.sleep(0)
            ours, other = socket.socketpair()
            threading.Timer(0.01, end_soon).start()
            ours.recv(1)
        finally:
            await asyncio.sleep(0)
            done.append("finally")
"""


@pytest.mark.parametrize("run", [SYNC, WAITING, IN_ANOTHER_TASK, BLOCKING])
def test_signal_ends_what_runs_and_not_its_teardown(
    run: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    record = tmp_path_factory.mktemp("episode") / "record"
    monkeypatch.setenv("RECORD", str(record))
    outcome = play(_BEGIN + run)
    assert outcome.reason == "exception"
    assert record.read_text() == "finally close"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
