"""The isolation of workers as the server sees it: which user, directory and mark a worker gets, and what is missing.

Owns the decision what is possible here (kernels, Pods and laptops differ) and logs once what is not enforced. The
worker applies it (sandbox). Invariant: no two living workers share a dedicated user, a directory or a mark.
"""

import asyncio
import itertools
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.phrases import list_some
from rljob_api.wire.contract import ENV_DISABLE_ISOLATION, ENV_TOKEN
from rljob_service.pool import process_marks
from rljob_service.pool.shared_files import SharedFolder
from rljob_service.pool.worker_packages import find_worker_packages
from rljob_service.worker import sandbox
from rljob_service.worker.process import scratch
from rljob_service.worker.sandbox import WorkerSandbox, private_folders
from rljob_service.worker.sandbox.system import libc_prctl
from rljob_service.worker.settings import MODULE_NAME, FunctionSettings

logger = logging.getLogger(__name__)

_PR_SET_DUMPABLE = 4
_NUM_USERS = 8192
"""Twice as many as a server has workers."""
_UID_BASES = (100_000_000 + os.getpid() % 100_000 * _NUM_USERS, 20_000)
"""Far from existing users and different for each server of a machine; else within a container's 65,536 users."""
_NEEDED_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7}
_PROBE_TIMEOUT_SECONDS = 60
_PROBE = "import os, sys; [os.stat(f'{path}/.') for path in sys.argv[1:]]; import rljob_service.worker.main, asyncio"


def protect_server() -> None:
    """Hide this process's environment and memory from processes of the same user: they contain the token."""
    libc_prctl(_PR_SET_DUMPABLE, 0)


class Isolation:
    def __init__(self, settings: FunctionSettings) -> None:
        self._settings = settings
        self.python = settings.python or sys.executable
        self._disabled = _read_disabled()
        self._temporary_root: str | None = None
        self._lock: int | None = None
        if not os.access(settings.scratch, os.W_OK | os.X_OK):
            self._temporary_root, self._lock = scratch.make_temporary()
        # Resolved: /var/run is a link, and a function expects its working directory to equal $TMPDIR.
        self._folder = scratch.prepare(Path(self._temporary_root or settings.scratch).resolve())
        self._modules = scratch.write_module(self._folder, MODULE_NAME, settings.source)
        first, self._no_uid = self._find_users()
        self._users = None if first is None else itertools.cycle(range(first, first + _NUM_USERS))
        self._used_uids: set[int] = set()
        own = (str(self._folder), self.python, os.environ.get("HOME", ""), *sys.path, *settings.folders)
        self._may_share_temporary = _has_container() and _may_share(private_folders.TEMPORARY, own)
        self.missing: list[str] = []

    def allocate_sandbox(self) -> WorkerSandbox:
        """Return the directory, mark and user of the next worker."""
        mark, uid = next(process_marks.MARKS), None
        if self._users is not None:
            # In turn: until they are reaped, dead processes of the user's last worker count as that user's.
            uid = next(user for user in self._users if user not in self._used_uids)
            self._used_uids.add(uid)
        path = scratch.make(self._folder, mark, uid)
        return WorkerSandbox(
            str(path), mark, uid, str(self._modules), os.getpid(), self._disabled, self._may_share_temporary
        )

    def release(self, worker_sandbox: WorkerSandbox, had_children: bool) -> None:
        """Clean up after a dead worker: kill its remaining processes and remove its directory in the background."""
        if had_children:
            process_marks.kill_processes(worker_sandbox.mark)
        asyncio.get_running_loop().run_in_executor(None, scratch.remove, worker_sandbox.scratch)
        if worker_sandbox.uid is not None:
            self._used_uids.discard(worker_sandbox.uid)

    def close(self) -> None:
        scratch.remove(self._temporary_root or self._folder)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def find_shared_folders(self) -> list[SharedFolder]:
        """Return /dev/shm and /tmp if the workers share them and only they do: else the server cannot know which files
        are its workers'."""
        folders = []
        if _has_container() and sandbox.lacks(self.missing, sandbox.PRIVATE_SHM):
            folders.append(SharedFolder(private_folders.SHARED_MEMORY, is_limited=True))
        if self._may_share_temporary and sandbox.lacks(self.missing, sandbox.PRIVATE_TMP):
            folders.append(SharedFolder(private_folders.TEMPORARY))
        return folders

    def record(self, missing: list[str]) -> None:
        self.missing = [*self._no_uid, *missing]
        for line in self.missing:
            logger.warning("not enforced here: %s (docs/isolation.md)", line)

    def _find_users(self) -> tuple[int | None, list[str]]:
        """Return the first uid that workers may have; or None and why there is none."""
        reason = self._find_obstacle()
        if reason is None:
            for base in _UID_BASES:
                if _are_mapped(base, base + _NUM_USERS):
                    problem = self._probe(base)
                    return (base, []) if problem is None else (None, [f"uid: {problem}"])
            reason = "this user namespace has too few users"
        return None, [f"uid: {reason}, so workers run as the server's own user"]

    def _find_obstacle(self) -> str | None:
        if sandbox.UID in self._disabled:
            return "turned off"
        found = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
        effective = int(found[1], 16) if found else 0
        absent = [name for name, bit in _NEEDED_CAPABILITIES.items() if not effective >> bit & 1]
        return f"the server lacks {', '.join('CAP_' + name for name in absent)}" if absent else None

    def _probe(self, uid: int) -> str | None:
        """Return why that user cannot run a worker here: the interpreter or a folder may be private to root."""
        packages = [str(path) for path in find_worker_packages().values() if path.is_dir()]
        folders = [str(self._folder), *packages, *self._settings.folders]
        if os.path.isabs(self._settings.path):
            folders.append(os.path.dirname(self._settings.path))
        try:
            subprocess.run(
                [self.python, "-P", "-c", _PROBE, *folders],
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
            needed = list_some([self.python, *folders], 1)
            return f"no other user can reach {needed}, so workers run as the server's own user"
        return None


def _has_container() -> bool:
    """Whether this server has a container to itself."""
    return os.getpid() == 1


def _may_share(folder: str, own: Iterable[str]) -> bool:
    """Return whether workers may write to this folder: nothing in it is of the server, or is what they run."""
    root = os.path.realpath(folder)
    return not any(f"{os.path.realpath(path)}/".startswith(f"{root}/") for path in own if path)


def _read_disabled() -> list[str]:
    names = [name for name in os.environ.get(ENV_DISABLE_ISOLATION, "").replace(" ", "").split(",") if name]
    if unknown := [name for name in names if name not in sandbox.MECHANISMS]:
        allowed = ", ".join(sandbox.MECHANISMS)
        raise UserError(f"{ENV_DISABLE_ISOLATION} must contain only {allowed}, got {', '.join(unknown)}")
    return names


def _are_mapped(first: int, end: int) -> bool:
    rows = [map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(start <= first and end <= start + num for start, _, num in rows)
