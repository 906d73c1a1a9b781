"""An engine's session ends as a whole, and says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Prints: the exit codes of two engines, the messages, the number of processes before and after the kill.
PROGRAM = """
import os, sys, time
import psutil
from rljob_trainer.worker.supervisor import EngineProcess
from rljob_trainer.worker.main import adopt_orphans, terminate_descendants
adopt_orphans()
def start(number, code):
    variables = {**os.environ, "RLJOB_TERMINATION_LOG": sys.argv[1]}
    return EngineProcess(number, variables, [sys.executable, "-c", code])
def wait(process):
    while (code := process.poll()) is None:
        time.sleep(0.01)
    return code
orphan = '''
import os, signal, sys, time
def parent():
    if os.fork() == 0:
        for _ in range(2):
            os.fork()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
parent()
print("ready", flush=True)
open(os.environ["RLJOB_TERMINATION_LOG"], "w").write("error: no such model")
sys.exit(78)
'''
first = start(0, orphan)
print(wait(first), first.message())
print(len(psutil.Process().children(recursive=True)) > 1)
first.kill()
first.kill()
print(psutil.Process().children(recursive=True))
second = start(1, "import time; time.sleep(600)")
print(repr(second.message()))
terminate_descendants(0, lambda: {second.session})
print(second.poll())
os.kill(second.session, 9)
print(wait(second))
second.kill()
third = start(2, "import time; time.sleep(600)")
third.terminate()
print(wait(third))
terminate_descendants(0)
"""


def test_session_ends_as_a_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "log")], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["78 no such model", "True", "[]", "''", "None", "-9", "-15"]
    assert "engine 0: ready" in done.stderr
