"""The head with a record of what each role did: bench/overlap.py runs it as the head's command.

Everything else is the product's code. It writes timeline.jsonl into the run's folder: one line per event,
`[seconds since the epoch, role, +1 or -1]` for the begin and end of a piece of work.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path

from rljob_api.manifest.job_spec import ServiceKind
from rljob_api.wire.contract import ENV_RUN_DIR
from rljob_trainer.driver import role_clock


class RecordingClock(role_clock.RoleClock):
    """A RoleClock that also writes its events, some at a time."""

    def __init__(self, now: float, kinds: Collection[ServiceKind] = ()) -> None:
        super().__init__(now, kinds)
        self._offset = time.time() - time.monotonic()
        self._lines: list[str] = []
        self._path = Path(os.environ[ENV_RUN_DIR]) / "timeline.jsonl"
        atexit.register(self._flush)

    def begin(self, role: role_clock.Role, now: float) -> None:
        super().begin(role, now)
        self._record(role, now, 1)

    def end(self, role: role_clock.Role, now: float) -> None:
        super().end(role, now)
        self._record(role, now, -1)

    def _record(self, role: role_clock.Role, now: float, change: int) -> None:
        self._lines.append(json.dumps([round(now + self._offset, 3), role, change]))
        if len(self._lines) >= 100:
            self._flush()

    def _flush(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in self._lines)
        self._lines = []


if __name__ == "__main__":
    role_clock.RoleClock = RecordingClock  # type: ignore[misc]  # before the driver imports it
    from rljob_trainer.head import main as head

    sys.exit(head.main())
