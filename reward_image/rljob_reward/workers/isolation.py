"""What keeps a worker in, as the server sees it: which user it gets, its directory, its mark, and what is missing.

Owns the decision what is possible here (a kernel, a Pod, a laptop differ) and says once in the log what is not. The
worker applies it (sandbox). Invariant: no two living workers share a user of their own, a directory or a mark.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.wire.contract import ENV_TOKEN
from rljob_reward.worker import sandbox, scratch
from rljob_reward.worker.loading import Settings
from rljob_reward.worker.sandbox import Cage
from rljob_reward.worker.sandbox.system import libc_prctl
from rljob_reward.workers import process_marks as marks

logger = logging.getLogger(__name__)

ENV_WITHOUT = "RLJOB_REWARD_DISABLE_ISOLATION"
"""Means of isolation that are not to be used, separated by commas: a way out where one stands in a function's way."""

_PR_SET_DUMPABLE = 4
_NUM_USERS = 8192
"""Twice as many as a server has workers."""
_UID_BASES = (100_000_000 + os.getpid() % 100_000 * _NUM_USERS, 20_000)
"""Far from users that exist, and for each server of a machine another; else what a container's 65,536 users have."""
_NEEDED_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7}
_PROBE_TIMEOUT_SECONDS = 60
# One slot is one process on one core: libraries must not start a thread for each core of the node in each of them.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "POLARS_MAX_THREADS")


def protect_server() -> None:
    """Nobody of the same user may look into this process, its environment or its memory: the token is there."""
    libc_prctl(_PR_SET_DUMPABLE, 0)


class Isolation:
    """Of the workers of one function."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.python = settings.python or sys.executable
        self._without = _read_without()
        self._own_root = None if _is_writable(settings.scratch) else tempfile.mkdtemp(prefix="rljob-reward-")
        if self._own_root:
            os.chmod(self._own_root, 0o711)  # the other users must pass through
        # Resolved: /var/run is a link, and a function must find its working directory to be $TMPDIR.
        self._folder = scratch.prepare(Path(self._own_root or settings.scratch).resolve())
        first, self._no_uid = self._find_users()
        self._users = None if first is None else itertools.cycle(range(first, first + _NUM_USERS))
        self._used_uids: set[int] = set()
        self.missing: list[str] = []

    def make_cage(self) -> Cage:
        """Where the next worker will live."""
        mark, uid = next(marks.MARKS), None
        if self._users is not None:
            # In turn: what the last worker of a user left is dead, but counts as its processes until it is reaped.
            uid = next(user for user in self._users if user not in self._used_uids)
            self._used_uids.add(uid)
        path = scratch.make(self._folder, mark, uid)
        return Cage(str(path), mark, uid, os.getpid(), self._without)

    def build_environment(self, cage: Cage) -> dict[str, str]:
        """A worker's environment: the server's, less what is none of user code's business."""
        environment = dict.fromkeys(_ONE_THREAD, "1") | dict(os.environ)
        environment.pop(ENV_TOKEN, None)
        home = os.environ.get("HOME")
        if home and "HF_HOME" not in environment:
            environment["HF_HOME"] = f"{home}/.cache/huggingface"  # models that are there can still be read
        return environment | dict.fromkeys(("HOME", "TMPDIR", "TMP", "TEMP"), cage.scratch)

    def release(self, cage: Cage, had_children: bool) -> None:
        """The worker is dead: end what it left, and remove its directory, which may take a while."""
        if had_children:
            marks.end(cage.mark)
        asyncio.get_running_loop().run_in_executor(None, scratch.remove, cage.scratch)
        if cage.uid is not None:
            self._used_uids.discard(cage.uid)

    def close(self) -> None:
        scratch.remove(self._own_root or self._folder)

    def record(self, missing: list[str]) -> None:
        """What a worker said that it could not enforce; said once."""
        self.missing = [*self._no_uid, *missing]
        for line in self.missing:
            logger.warning("not enforced here: %s (docs/isolation.md)", line)

    def _find_users(self) -> tuple[int | None, list[str]]:
        """First of the users that workers may have; None and why."""
        lacking = self._why_no_users()
        if lacking is None:
            for base in _UID_BASES:
                if _are_mapped(base, base + _NUM_USERS):
                    problem = self._probe(base)
                    return (base, []) if problem is None else (None, [f"uid: {problem}"])
            lacking = "this user namespace has too few users"
        return None, [f"uid: {lacking}, so workers run as the server's own user"]

    def _why_no_users(self) -> str | None:
        if sandbox.UID in self._without:
            return "turned off"
        text = Path("/proc/self/status").read_text()
        found = re.search(r"^CapEff:\s*(\w+)", text, re.MULTILINE)
        effective = int(found[1], 16) if found else 0
        absent = [name for name, bit in _NEEDED_CAPABILITIES.items() if not effective >> bit & 1]
        return f"the server lacks {', '.join('CAP_' + name for name in absent)}" if absent else None

    def _probe(self, uid: int) -> str | None:
        """Whether that user can run a worker here at all: interpreter and folders may lie in one of root's."""
        needed = [self.python, str(self._folder)]
        if os.path.isabs(self._settings.path):
            needed.append(os.path.dirname(self._settings.path))
        code = (
            "import os, sys; [os.stat(f'{path}/.') for path in sys.argv[1:]]; import rljob_reward.worker.main, asyncio"
        )
        try:
            subprocess.run(
                [self.python, "-P", "-c", code, *needed[1:]],
                user=uid,
                group=uid,
                extra_groups=[],
                env={name: value for name, value in os.environ.items() if name != ENV_TOKEN},
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_TIMEOUT_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return f"no other user can reach {', '.join(needed)}, so workers run as the server's own user"
        return None


def _read_without() -> list[str]:
    names = [name for name in os.environ.get(ENV_WITHOUT, "").replace(" ", "").split(",") if name]
    if unknown := [name for name in names if name not in sandbox.MEANS]:
        raise UserError(f"{ENV_WITHOUT} may name {', '.join(sandbox.MEANS)}, got {', '.join(unknown)}")
    return names


def _is_writable(path: str) -> bool:
    return bool(path) and os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _are_mapped(first: int, end: int) -> bool:
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        start, _, num = map(int, line.split())
        if start <= first and end <= start + num:
            return True
    return False
