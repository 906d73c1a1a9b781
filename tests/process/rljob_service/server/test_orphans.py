"""Reaping, in a separate process: one that adopts orphans must have no other children."""

import subprocess
import sys

PROGRAM = """
import asyncio, os, subprocess, sys
from rljob_service.server.lifecycle import Orphans

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
    print("orphan exists:", os.path.exists(f"/proc/{orphan.pid}"))
    alive = subprocess.Popen(["sleep", "600"])
    await orphans.end()
    print("living child after end():", os.path.exists(f"/proc/{alive.pid}"))

asyncio.run(main())
"""


def test_orphans_are_reaped_but_dead_workers_keep_their_exit_status() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout.splitlines() == [
        "worker: 3",
        "orphan exists: False",
        "living child after end(): False",
    ], ended.stderr
