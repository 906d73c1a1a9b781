"""Reaping, in a process of its own: whoever adopts orphans must have no other children."""

import subprocess
import sys

PROGRAM = """
import asyncio, os, subprocess, sys
from rljob_reward.orphans import Orphans

async def main():
    worker = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    is_worker = lambda pid: pid == worker.pid
    orphans = Orphans(is_worker)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    orphans._reap()
    print("worker:", worker.wait())
    orphan = subprocess.Popen([sys.executable, "-c", "raise SystemExit(4)"])
    os.waitid(os.P_PID, orphan.pid, os.WEXITED | os.WNOWAIT)
    orphans._reap()
    print("orphan in the table:", os.path.exists(f"/proc/{orphan.pid}"))
    alive = subprocess.Popen(["sleep", "600"])
    await orphans.end()
    print("living one after the end:", os.path.exists(f"/proc/{alive.pid}"))

asyncio.run(main())
"""


def test_a_worker_that_is_dead_keeps_its_exit_status_and_others_are_reaped() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.splitlines() == [
        "worker: 3",
        "orphan in the table: False",
        "living one after the end: False",
    ], ended.stderr
