"""Provider process of the tools that run code: each call is a new process in an empty folder.

The process inherits the sandbox of its worker, and gets a further one: it writes only to its folder, reads that folder
and the system's, and cannot touch the worker. Owns its end: at the timeout, at the limit of memory of all its
processes, and at that of output. Invariant: when a call returns, nothing that it started is left.
"""

import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time

from rljob_api.quantity import format_bytes
from rljob_service.worker import sandbox
from rljob_service.worker.code import code_runner
from rljob_service.worker.code.code_output import Output, describe_exit
from rljob_service.worker.code.follower import Follower
from rljob_service.worker.process import scratch
from rljob_service.worker.sandbox.system import libc_prctl

_PR_SET_CHILD_SUBREAPER = 36
_MAX_OUTPUT_BYTES = 16 << 20
"""More of it only costs time."""
_POLL_SECONDS = 0.1
_MAX_SWEEPS = 400
_SWEEP_SECONDS = 0.005
_SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/opt", "/sbin", "/sys", "/usr")
"""What code may read and execute, with the interpreter of the tool and its packages, and parts of /etc and /proc."""


class CodeProcesses:
    """Runs code in processes of this worker."""

    problem = ""

    def __init__(self, timeout_seconds: float, max_characters: int) -> None:
        """`max_characters`: of what the model sees of a call."""
        self._timeout_seconds = timeout_seconds
        self._max_characters = max_characters
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self._readable = [
            *_SYSTEM,
            *find_public("/etc"),
            # Not other processes, whose command lines may have secrets. /proc/self is that of the code.
            *(f"/proc/{name}" for name in os.listdir("/proc") if not name.isdecimal()),
            sys.prefix,
            sys.base_prefix,
            os.path.abspath(code_runner.__file__),
            *filter(None, paths),
        ]
        # What the code leaves behind becomes a child of this process, which then finds it.
        libc_prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def run(self, language: str, code: str, episode: str) -> str:
        """Return what the model sees."""
        if problem := code_runner.find_problem(code):
            return problem
        folder = tempfile.mkdtemp(prefix="call-")
        try:
            return self._run(code_runner.build_command(language, code), folder)
        finally:
            scratch.remove(folder)

    def end(self, episode: str) -> None:
        """Do nothing: calls share nothing."""

    def _run(self, command: list[str], folder: str) -> str:
        output, worker_pid = Output(self._max_characters), os.getpid()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=build_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
            preexec_fn=lambda: sandbox.confine(folder, self._readable, worker_pid),
        )
        assert process.stdout is not None
        with process, Follower(process, {process.stdout: output.take}) as follower:
            try:
                end = self._follow(follower, output)
            finally:
                end_processes(process)
            follower.read_rest()
        return output.describe(end or describe_exit(process.returncode))

    def _follow(self, follower: Follower, output: Output) -> str:
        """Wait for the end of the program, or for why it must end, and return the latter."""
        deadline = time.monotonic() + self._timeout_seconds
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        while not follower.wait(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
            if output.num_bytes > _MAX_OUTPUT_BYTES:
                return f"ended: it printed more than {format_bytes(_MAX_OUTPUT_BYTES)}"
            if limit != resource.RLIM_INFINITY and count_memory_bytes(os.getpid()) > limit:
                return f"ended: it used more than {format_bytes(limit)} of memory"
            if time.monotonic() >= deadline:
                return f"timed out after {self._timeout_seconds:g} s"
        return ""


def find_public(path: str) -> list[str]:
    """Return what every user of the machine may read at a path, without links: the path itself if that is all."""
    mode = os.stat(path).st_mode
    wanted = stat.S_IROTH | stat.S_IXOTH * stat.S_ISDIR(mode)
    if mode & wanted != wanted or not stat.S_ISDIR(mode):
        return [path] if mode & wanted == wanted else []
    entries = [entry.path for entry in os.scandir(path) if not entry.is_symlink()]
    found = [each for entry in entries for each in find_public(entry)]
    return [path] if found == entries else found


def build_environment(folder: str) -> dict[str, str]:
    """Return that of the worker, with the interpreter of the tool first, and the folder as home."""
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    return {**os.environ, "PATH": path} | dict.fromkeys(scratch.HOME_VARIABLES, folder)


def end_processes(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and all that it started, and wait until they have ended. Raise RuntimeError if one does not."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all of the group have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(_MAX_SWEEPS):
        if not _reap():
            return
        for pid in find_descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SWEEP_SECONDS)
    raise RuntimeError("a process of the code does not end")


def _reap() -> bool:
    """Take the exit status of all children that have ended. Return whether others are left."""
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return True
    return False


def find_descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and what those have started."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])  # the name may have any character
            children.setdefault(parent, []).append(int(name))
    found = children.get(pid, [])
    for each in found:  # grows meanwhile
        found += children.get(each, [])
    return found


def count_memory_bytes(pid: int) -> int:
    """Return the memory of the processes that a process has started, without what they share with files."""
    num_pages = 0
    for each in find_descendants(pid):
        with contextlib.suppress(OSError), open(f"/proc/{each}/statm", "rb") as file:
            _, resident, shared, *_ = map(int, file.read().split())
            num_pages += resident - shared
    return num_pages * resource.getpagesize()
