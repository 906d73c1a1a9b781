"""The sandbox of a worker process: restrictions on user code, enforced by the kernel and without privileges.

Runs in the worker before any user code, and uses only the standard library. enter() returns what the kernel does not
offer. docs/isolation.md lists what each mechanism protects from.

A worker with a private /tmp still sees of the machine's its interpreter, and what the job names. All of it is
read-only, and so is what lies next to it. Code of the policy sees the interpreter alone.
"""

import array
import contextlib
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from rljob_service.worker.process import scratch as scratch_folders
from rljob_service.worker.process.scratch import is_temporary
from rljob_service.worker.sandbox import landlock, private_folders, seccomp
from rljob_service.worker.sandbox.private_folders import TEMPORARY
from rljob_service.worker.sandbox.system import die_with, libc_prctl, raise_errno, syscall
from rljob_service.worker.settings import FunctionSettings


def find_visible(settings: FunctionSettings, scratch: str, modules: str) -> Iterator[str]:
    """Yield the paths. `scratch`: the worker's own directory, which stays writable. `modules`: see WorkerSandbox."""
    yield from filter(None, (modules, sys.prefix, sys.base_prefix, *sys.path))
    if settings.runs_code_of_policy:
        return
    environment = [value for value in os.environ.values() if not value.startswith(scratch)]
    source = [settings.path, os.path.dirname(settings.path)] if os.path.isabs(settings.path) else []
    for path in (*source, *settings.folders, *find_paths([settings.kwargs, settings.factory_args, environment])):
        # What the job names may need files next to it: all that is below the same entry of /tmp.
        top = "/".join(path.split("/")[:3])
        if path.startswith(f"{TEMPORARY}/") and not is_temporary(top):
            yield top
    if TEMPORARY in source:
        yield from _find_modules(TEMPORARY)


def find_paths(value: Any) -> Iterator[str]:
    """Yield the absolute paths in a value as JSON has it."""
    if isinstance(value, str) and value.startswith("/"):
        yield from value.split(os.pathsep)
    elif isinstance(value, dict):
        yield from find_paths(list(value.values()))
    elif isinstance(value, list):
        for each in value:
            yield from find_paths(each)


def _find_modules(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py") or os.path.exists(f"{entry.path}/__init__.py"):
                yield entry.path


_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522
_NUM_CAPABILITIES = 64
_OPEN_FILES = (1024, 4096)

UID, LANDLOCK, SECCOMP, SECCOMP_LISTENER = "uid", "landlock", "seccomp", "seccomp-listener"
PRIVATE_SHM, PRIVATE_TMP = "private-shm", "private-tmp"
MECHANISMS = (UID, LANDLOCK, SECCOMP, SECCOMP_LISTENER, PRIVATE_SHM, PRIVATE_TMP)
"""Can be disabled by name ($RLJOB_REWARD_DISABLE_ISOLATION), if one prevents a function from working."""
_PRIVATE_HOME = f"{private_folders.TEMPORARY}/home"
"""$TMPDIR, $HOME and the working directory in a private /tmp: the same in every worker, because agents write it into
prompts, and those of a group are equal."""

_disabled: list[str] = []
"""Mechanisms of this worker."""
_writable: list[str] = []
"""What code of the policy may write to besides its folder."""
_own: list[str] = []
"""What the worker may write to."""


class WorkerSandbox(NamedTuple):
    scratch: str
    """The directory that has all its files."""
    mark: int
    """Identifies the worker's processes for the server."""
    uid: int | None
    """A dedicated user; None where that is not possible."""
    modules: str
    """Directory with the function's source as a module, for the processes that multiprocessing starts."""
    server_pid: int
    disabled: list[str]
    may_share_temporary: bool = False
    """Whether workers may write to the same /tmp, where none can be private."""

    @property
    def home(self) -> str:
        """$TMPDIR, $HOME and the working directory, unless /tmp is private."""
        return scratch_folders.home_of(self.scratch)

    @property
    def temporary(self) -> str:
        """What is /tmp for the worker, if it has a private one."""
        return scratch_folders.temporary_of(self.scratch)


def enter(settings: FunctionSettings, worker_sandbox: WorkerSandbox, handover: socket.socket) -> list[str]:
    """Restrict this process permanently. Send the seccomp listener through `handover`; return what is not enforced."""
    _disabled[:] = worker_sandbox.disabled
    # When memory runs out, the kernel must kill this process rather than the server.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    missing = _make_folders_private(settings, worker_sandbox)
    _switch_user(worker_sandbox)
    lacks_tmp, home = lacks(missing, PRIVATE_TMP), worker_sandbox.home
    if not lacks_tmp:
        os.rmdir(home)
        home = _PRIVATE_HOME
        os.mkdir(home, 0o700)
        os.environ.update(dict.fromkeys(scratch_folders.HOME_VARIABLES, home))
    os.chdir(home)
    _writable[:] = [private_folders.SHARED_MEMORY, *([] if lacks_tmp else [private_folders.TEMPORARY])]
    shared = [private_folders.TEMPORARY] if lacks_tmp and worker_sandbox.may_share_temporary else []
    _own[:] = [home, worker_sandbox.temporary, *_writable, *shared]
    _set_limits(settings, worker_sandbox)
    if libc_prctl(_PR_SET_NO_NEW_PRIVS, 1) != 0:
        raise_errno("prctl(PR_SET_NO_NEW_PRIVS)")
    scopes = 0
    if LANDLOCK in worker_sandbox.disabled:
        missing.append("landlock: turned off")
    else:
        scopes, lacking = landlock.restrict(_own)
        missing += lacking
    if SECCOMP in worker_sandbox.disabled:
        missing.append("seccomp: turned off: the network, the number of processes and signals are not restricted")
    else:
        signals_are_scoped = bool(scopes & landlock.SCOPE_SIGNAL)
        missing += _filter_calls(settings, worker_sandbox, handover, signals_are_scoped=signals_are_scoped)
    return missing


def confine(folder: str, readable: Iterable[str], worker_pid: int) -> None:
    """Restrict this process, which its worker has started for code of the policy, further: it writes below `folder` and
    to its worker's private /tmp, reads there and what is `readable`, and cannot touch its worker. Raise OSError if a
    mechanism fails."""
    if libc_prctl(_PR_SET_NO_NEW_PRIVS, 1) != 0:
        raise_errno("prctl(PR_SET_NO_NEW_PRIVS)")
    if LANDLOCK not in _disabled:
        landlock.confine([folder, *_writable], readable)
    if SECCOMP not in _disabled:
        with contextlib.suppress(OSError):  # missing here: the worker has said so
            seccomp.install(seccomp.build_guard(worker_pid), listen=False)


def prepare_calls() -> Callable[[], None]:
    """Return what restricts a process further that this worker has forked for one request: it cannot touch its worker.
    It raises OSError if a mechanism fails."""
    ruleset = landlock.prepare(_own) if LANDLOCK not in _disabled else None
    guard = None
    if SECCOMP not in _disabled:
        with contextlib.suppress(OSError):  # missing here: the worker has said so
            guard = seccomp.Program(seccomp.build_guard(os.getpid()))

    def confine() -> None:
        if ruleset is not None:
            landlock.enforce(ruleset)
            os.close(ruleset)
        if guard is not None:
            with contextlib.suppress(OSError):
                guard.install(listen=False)

    return confine


def lacks(missing: Iterable[str], mechanism: str) -> bool:
    """Return whether this mechanism is one of those that enter() has reported as missing."""
    return any(line.startswith(f"{mechanism}:") for line in missing)


def _make_folders_private(settings: FunctionSettings, worker_sandbox: WorkerSandbox) -> list[str]:
    def mount_temporary() -> None:
        visible = list(find_visible(settings, worker_sandbox.scratch, worker_sandbox.modules))
        private_folders.mount_temporary(worker_sandbox.temporary, worker_sandbox.scratch, visible)

    where = "is shared by the workers" if worker_sandbox.may_share_temporary else "cannot be written"
    mounts: dict[str, tuple[Callable[[], None], str]] = {
        PRIVATE_SHM: (
            partial(private_folders.mount_shared_memory, settings.max_file_bytes),
            f"files in {private_folders.SHARED_MEMORY} are shared, and only its size bounds them",
        ),
        PRIVATE_TMP: (mount_temporary, f"{private_folders.TEMPORARY} {where}"),
    }
    wanted = [name for name in mounts if name not in worker_sandbox.disabled]
    problems = dict.fromkeys(mounts, "turned off")
    try:
        if wanted:
            private_folders.enter_namespace(may_map_user=worker_sandbox.uid is None)
            die_with(worker_sandbox.server_pid)
        for name in wanted:
            problems[name] = _try(mounts[name][0])
    except OSError as error:
        problems |= dict.fromkeys(wanted, str(error))
    return [f"{name}: {problem}: {mounts[name][1]}" for name, problem in problems.items() if problem]


def has_private_temporary() -> bool:
    """Return whether /tmp is this worker's own."""
    return private_folders.TEMPORARY in _writable


def _try(action: Callable[[], None]) -> str:
    try:
        action()
    except OSError as error:
        return str(error)
    return ""


def _switch_user(worker_sandbox: WorkerSandbox) -> None:
    """Become the dedicated user, or drop the privileges of the current one."""
    if worker_sandbox.uid is None:
        _drop_capabilities()
        return
    os.setgroups([])
    os.setresgid(worker_sandbox.uid, worker_sandbox.uid, worker_sandbox.uid)
    os.setresuid(worker_sandbox.uid, worker_sandbox.uid, worker_sandbox.uid)
    libc_prctl(_PR_SET_DUMPABLE, 1)  # lets it read its own /proc/self again
    die_with(worker_sandbox.server_pid)


def _drop_capabilities() -> None:
    for number in range(_NUM_CAPABILITIES):
        libc_prctl(_PR_CAPBSET_DROP, number)  # fails without CAP_SETPCAP, where there is nothing to drop either
    header = array.array("I", [_CAPABILITY_VERSION_3, 0])
    none = array.array("I", [0] * 6)
    capset = _CAPSET.get(os.uname().machine)
    if capset is not None and syscall(capset, header.buffer_info()[0], none.buffer_info()[0]) != 0:
        raise_errno("capset")


def _set_limits(settings: FunctionSettings, worker_sandbox: WorkerSandbox) -> None:
    memory, file = settings.max_memory_bytes, settings.max_file_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file, file))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(min(wanted, hard) for wanted in _OPEN_FILES))  # type: ignore[arg-type]
    resource.setrlimit(seccomp.RLIMIT_LOCKS, (worker_sandbox.mark, worker_sandbox.mark))


def _filter_calls(
    settings: FunctionSettings, worker_sandbox: WorkerSandbox, handover: socket.socket, *, signals_are_scoped: bool
) -> list[str]:
    processes = os.getpid(), worker_sandbox.server_pid
    build = partial(seccomp.build_rules, *processes, network=settings.network, signals_are_scoped=signals_are_scoped)
    try:
        if SECCOMP_LISTENER not in worker_sandbox.disabled:
            listener = seccomp.install(build(supervised=True), listen=True)
            socket.send_fds(handover, [b"l"], [listener])
            os.close(listener)  # user code must not answer for the server
            return []
        reason = "turned off"
    except OSError as error:
        reason = str(error)
    try:
        seccomp.install(build(supervised=False), listen=False)
    except OSError as error:
        return [f"seccomp: {error}: the network, the number of processes and signals are not restricted"]
    if worker_sandbox.uid is not None:
        # The kernel counts per user and machine, so this limit needs a dedicated user. Zombies count too: a worker at
        # its limit may also fail its next calls.
        max_processes = settings.process_limit + 1
        resource.setrlimit(resource.RLIMIT_NPROC, (max_processes, max_processes))
        return []
    lacking = [f"{SECCOMP_LISTENER}: {reason}: the number of processes is not restricted"]
    if not signals_are_scoped:
        lacking.append(f"{SECCOMP_LISTENER}: signals to other workers are not refused")
    return lacking
