"""The cage of a worker process: what user code may not do, enforced by the kernel and without privileges.

Runs in the worker before any user code, and uses the standard library alone. What a kernel does not offer is named in
what enter() returns, never passed over in silence. docs/isolation.md says what each means protects from.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import signal
import socket
from typing import NamedTuple

from rljob_reward.worker.sandbox import landlock, seccomp
from rljob_reward.worker.sandbox.system import libc_prctl, raise_errno, syscall

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522
_NUM_CAPABILITIES = 64
_OPEN_FILES = (1024, 4096)
RLIMIT_LOCKS = 10
"""No kernel since 2.4 reads this limit, but each process inherits it and none can raise it: a worker's mark."""
BLOCKED_ERRNO = errno.ENETDOWN
"""What socket() fails with where there is no network: nothing else makes it fail so."""

UID, LANDLOCK, SECCOMP, GATE = "uid", "landlock", "seccomp", "gate"
MEANS = (UID, LANDLOCK, SECCOMP, GATE)
"""What can be turned off by name ($RLJOB_REWARD_DISABLE_ISOLATION), should it stand in the way of a function."""


class Limits(NamedTuple):
    """What user code may use, from the reward's manifest."""

    memory_mib: int
    file_mib: int
    processes: int
    network: bool


class Cage(NamedTuple):
    """Where one worker lives."""

    scratch: str
    """Its own directory, the only place that it may write to."""
    mark: int
    """Its number, by which the server knows its processes."""
    uid: int | None
    """Another user than the server's, its own; None where that is not possible."""
    server_pid: int
    without: list[str]
    """Means that are turned off."""


def enter(limits: Limits, cage: Cage, handover: socket.socket) -> list[str]:
    """Lock this process in, for good. Sends the gate's descriptor through `handover`; returns what is not enforced."""
    _be_first_to_die()
    _become(cage)
    os.chdir(cage.scratch)
    _set_limits(limits, cage)
    if libc_prctl(_PR_SET_NO_NEW_PRIVS, 1) != 0:
        raise_errno("prctl(PR_SET_NO_NEW_PRIVS)")
    missing: list[str] = []
    scopes = 0
    if LANDLOCK in cage.without:
        missing.append("landlock: turned off")
    else:
        scopes, lacking = landlock.restrict(cage.scratch)
        missing += lacking
    if SECCOMP in cage.without:
        missing.append("seccomp: turned off: the network, the number of processes and signals are not restricted")
    else:
        missing += _filter_calls(limits, cage, handover, signals_are_scoped=bool(scopes & landlock.SCOPE_SIGNAL))
    return missing


def _be_first_to_die() -> None:
    """When memory runs out, the kernel takes this process and not the server."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _become(cage: Cage) -> None:
    """The other user, or the same one without its privileges."""
    if cage.uid is None:
        _drop_capabilities()
        return
    os.setgroups([])
    os.setresgid(cage.uid, cage.uid, cage.uid)
    os.setresuid(cage.uid, cage.uid, cage.uid)
    libc_prctl(_PR_SET_DUMPABLE, 1)  # its own /proc/self is its own again
    # The kernel forgets this with a change of user.
    libc_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != cage.server_pid:
        os._exit(1)


def _drop_capabilities() -> None:
    for number in range(_NUM_CAPABILITIES):
        libc_prctl(_PR_CAPBSET_DROP, number)  # fails without CAP_SETPCAP, where there is nothing to drop either
    header = array.array("I", [_CAPABILITY_VERSION_3, 0])
    none = array.array("I", [0] * 6)
    capset = _CAPSET.get(os.uname().machine)
    if capset is not None and syscall(capset, header.buffer_info()[0], none.buffer_info()[0]) != 0:
        raise_errno("capset")


def _set_limits(limits: Limits, cage: Cage) -> None:
    memory, file = limits.memory_mib << 20, limits.file_mib << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file, file))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(min(wanted, hard) for wanted in _OPEN_FILES))  # type: ignore[arg-type]
    resource.setrlimit(RLIMIT_LOCKS, (cage.mark, cage.mark))


def _limit_processes(limits: Limits, cage: Cage) -> list[str]:
    """Where no gate counts: the kernel counts by user over the whole machine, which makes sense for a user of one's own
    alone. The dead that nobody waited for count too, so a worker that hit it may fail its next calls as well."""
    if cage.uid is None:
        return ["the number of processes is not restricted"]
    most = limits.processes + 1
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    return []


def _filter_calls(limits: Limits, cage: Cage, handover: socket.socket, *, signals_are_scoped: bool) -> list[str]:
    def build(gated: bool) -> list[seccomp.Rule]:
        return seccomp.build_rules(
            os.getpid(),
            cage.server_pid,
            network=limits.network,
            gated=gated,
            signals_are_scoped=signals_are_scoped,
            blocked_errno=BLOCKED_ERRNO,
        )

    try:
        if GATE not in cage.without:
            listener = seccomp.install(build(True), listen=True)
            socket.send_fds(handover, [b"g"], [listener])
            os.close(listener)  # user code must not answer for the server
            return []
        reason = "turned off"
    except OSError as error:
        reason = str(error)
    try:
        seccomp.install(build(False), listen=False)
    except OSError as error:
        return [f"seccomp: {error}: the network, the number of processes and signals are not restricted"]
    lacking = [f"gate: {reason}: {what}" for what in _limit_processes(limits, cage)]
    if not signals_are_scoped and cage.uid is None:
        lacking.append("gate: signals to other workers are not refused")
    return lacking
