"""Seccomp: which system calls user code may make, as a BPF program that its descendants inherit and cannot leave.

build_rules() is the policy and pure, assemble() its translation, install() the only effect. The kernel passes calls
that depend on other processes (starting or signalling one) to the server (pool/seccomp_supervisor.py). Arguments
are compared as the kernel reads them: integers of 32 bits.

System calls have numbers by architecture; those above 423 are the same on all.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

from rljob_service.worker.sandbox.system import raise_errno, syscall

KILL = 0x80000000
ALLOW = 0x7FFF0000
NOTIFY = 0x7FC00000
EQUAL, NOT_EQUAL, ANY_BIT = "==", "!=", "&"

_SET_MODE_FILTER = 1
_FLAG_SPEC_ALLOW, _FLAG_NEW_LISTENER = 1 << 2, 1 << 3
_FLAG_WAIT_KILLABLE = 1 << 5
"""Linux 5.19. Without it, a signal ends a call that waits for the listener: under dash, the end of a pipeline's first
process made the fork of its second one fail."""
_LOAD, _JUMP_EQUAL, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENTS = 0, 4, 16
_X32_BIT = 0x40000000
_CLONE_NAMESPACES = 0x7E020080
RLIMIT_LOCKS = 10
"""Holds a worker's mark: no kernel since 2.4 enforces this limit, each process inherits it, and none can raise it."""
BLOCKED_ERRNO = errno.ENETDOWN
"""Error of socket() without function.network; no other cause produces it."""
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1
_TERMINAL_INPUT = (0x5412, 0x541C, 0x540E)
"""TIOCSTI, TIOCLINUX, TIOCSCTTY."""

_REFUSED = (
    # Other processes' memory and files.
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp", "pidfd_getfd"),
    *("migrate_pages", "move_pages", "perf_event_open", "userfaultfd"),
    # The machine, its mounts, namespaces, keys and clocks.
    *("mount", "umount2", "pivot_root", "chroot", "setns", "unshare", "move_mount", "open_tree", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "open_by_handle_at", "bpf", "keyctl", "add_key", "request_key", "syslog"),
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "swapon", "swapoff", "reboot"),
    *("acct", "quotactl", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname"),
    *("setdomainname", "ioperm", "iopl"),
    # Memory that no limit counts and that outlives its process.
    *("shmget", "semget", "msgget", "mq_open"),
)
_UNKNOWN = ("io_uring_setup", "io_uring_enter", "io_uring_register", "clone3", "memfd_create", "memfd_secret")
"""Fail as in a kernel that lacks them: libraries then use older calls, which the rules can restrict."""
_SIGNALS = ("kill", "tgkill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
_SCHEDULING = ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")

SPAWNING = ("fork", "vfork", "clone")
PID_ARGUMENT = {"setpriority": 1, "ioprio_set": 1, "prlimit64": 0} | dict.fromkeys((*_SIGNALS, *_SCHEDULING), 0)
"""For calls that the supervisor decides: the index of the argument with the other process's pid."""


def refuse(code: int) -> int:
    """Return the action that makes a call fail with this errno."""
    return 0x00050000 | code


class Case(NamedTuple):
    """An action for calls whose argument satisfies this test."""

    argument: int
    test: str
    value: int
    action: int


class Rule(NamedTuple):
    """The policy for one call: the action of the first matching case, else `otherwise`."""

    call: str
    otherwise: int
    cases: tuple[Case, ...] = ()


def build_rules(
    own_pid: int, server_pid: int, *, network: bool, supervised: bool, signals_are_scoped: bool
) -> list[Rule]:
    """Return the policy. `supervised`: a server answers notifications."""
    denied = refuse(errno.EPERM)
    rules = [Rule(call, denied) for call in _REFUSED] + [Rule(call, refuse(errno.ENOSYS)) for call in _UNKNOWN]
    spawn = NOTIFY if supervised else ALLOW
    rules += [Rule("fork", spawn), Rule("vfork", spawn)]
    rules.append(Rule("clone", spawn, (Case(0, ANY_BIT, _CLONE_NAMESPACES, denied),)))
    if not signals_are_scoped:
        rules += [Rule("pidfd_send_signal", denied), *_build_signal_rules(own_pid, server_pid, supervised)]
    touch = NOTIFY if supervised else denied
    rules += [Rule(call, touch, _allow_on_itself(0, own_pid)) for call in _SCHEDULING]
    rules += [
        Rule("setpriority", touch, (Case(0, NOT_EQUAL, _PRIO_PROCESS, denied), *_allow_on_itself(1, own_pid))),
        Rule("ioprio_set", touch, (Case(0, NOT_EQUAL, _IOPRIO_WHO_PROCESS, denied), *_allow_on_itself(1, own_pid))),
        # The mark that identifies a worker's processes.
        Rule("prlimit64", touch, (Case(1, EQUAL, RLIMIT_LOCKS, denied), *_allow_on_itself(0, own_pid))),
        Rule("setrlimit", ALLOW, (Case(0, EQUAL, RLIMIT_LOCKS, denied),)),
    ]
    # Fake input of a terminal, and its adoption as the controlling one.
    rules.append(Rule("ioctl", ALLOW, tuple(Case(1, EQUAL, request, denied) for request in _TERMINAL_INPUT)))
    return rules if network else [*rules, *_build_socket_rules(supervised)]


def _build_socket_rules(supervised: bool) -> list[Rule]:
    """Allow Unix sockets within the worker: one with a path reaches any server of this machine."""
    blocked = refuse(BLOCKED_ERRNO)
    # Datagrams name a path with each message.
    datagrams = Case(1, ANY_BIT, socket.SOCK_DGRAM, blocked)
    rules = [Rule("socketpair", ALLOW, (datagrams,))]
    if not supervised:
        return [*rules, Rule("socket", blocked)]
    family = Case(0, NOT_EQUAL, socket.AF_UNIX, blocked)
    return [*rules, Rule("socket", ALLOW, (family, datagrams)), Rule("connect", NOTIFY)]


def _allow_on_itself(argument: int, own_pid: int) -> tuple[Case, ...]:
    return Case(argument, EQUAL, 0, ALLOW), Case(argument, EQUAL, own_pid, ALLOW)


def _build_signal_rules(own_pid: int, server_pid: int, supervised: bool) -> list[Rule]:
    denied = refuse(errno.EPERM)
    cases = (*_allow_on_itself(0, own_pid), Case(0, EQUAL, -1, denied))
    if not supervised:
        # A function must be able to kill what it started: without a supervisor only the server is protected.
        cases += (Case(0, EQUAL, server_pid, denied), Case(0, EQUAL, -server_pid, denied))
    return [Rule(call, NOTIFY if supervised else ALLOW, cases) for call in _SIGNALS]


def build_guard(pid: int) -> list[Rule]:
    """Return a further policy for what a worker starts: calls that signal or adjust the worker, `pid`, fail.

    The worker's own policy allows them, since it does not know who calls.
    """
    denied = refuse(errno.EPERM)
    return [
        Rule(call, ALLOW, tuple(Case(argument, EQUAL, target, denied) for target in (pid, -pid)))
        for call, argument in PID_ARGUMENT.items()
    ]


def assemble(rules: Iterable[Rule], machine: str | None = None) -> bytes:
    """The rules as a BPF program. Calls of another architecture kill the process: their numbers differ."""
    machine = machine or os.uname().machine
    known = numbers(machine)
    if machine not in AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"the numbers of system calls on {machine} are unknown")
    program = [(_LOAD, 0, 0, _OFFSET_ARCH), (_JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]), (_RETURN, 0, 0, KILL)]
    program += [(_LOAD, 0, 0, _OFFSET_NUMBER), (_JUMP_BITS, 0, 1, _X32_BIT), (_RETURN, 0, 0, KILL)]
    for rule in rules:
        if rule.call in known:
            body = _translate(rule)
            program += [(_JUMP_EQUAL, 0, len(body), known[rule.call]), *body]
    program.append((_RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _translate(rule: Rule) -> list[tuple[int, int, int, int]]:
    body = []
    for case in rule.cases:
        jump = _JUMP_BITS if case.test == ANY_BIT else _JUMP_EQUAL
        skip = (1, 0) if case.test == NOT_EQUAL else (0, 1)
        body.append((_LOAD, 0, 0, _OFFSET_ARGUMENTS + 8 * case.argument))
        body += [(jump, *skip, case.value & 0xFFFFFFFF), (_RETURN, 0, 0, case.action)]
    return [*body, (_RETURN, 0, 0, rule.otherwise)]


class Program:
    """A policy as the kernel reads it. Made once, it can be installed in many forked processes."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        program = assemble(rules)
        self._code = ctypes.create_string_buffer(program, len(program))
        header = struct.pack("@HP", len(program) // 8, ctypes.addressof(self._code))
        self._header = ctypes.create_string_buffer(header)
        self._number = numbers()["seccomp"]

    def install(self, *, listen: bool) -> int:
        """Filter this process's calls from now on. Return the listener's descriptor if `listen`."""
        listening = (_FLAG_NEW_LISTENER | _FLAG_WAIT_KILLABLE, _FLAG_NEW_LISTENER) if listen else (0,)
        for flags in listening:
            address = ctypes.addressof(self._header)
            result = syscall(self._number, _SET_MODE_FILTER, _FLAG_SPEC_ALLOW | flags, address)
            if result >= 0:
                return result
        raise_errno("seccomp")


def install(rules: list[Rule], *, listen: bool) -> int:
    """Filter this process's calls from now on. Return the listener's descriptor if `listen`."""
    return Program(rules).install(listen=listen)


AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Seccomp's identifiers of architectures, in the order of the columns below."""

_NUMBERS = """
    acct 163 89, add_key 248 217, adjtimex 159 171, bpf 321 280, chroot 161 51, clock_adjtime 305 266,
    clock_settime 227 112, clone3 435 435, clone 56 220, connect 42 203, delete_module 176 106, finit_module 313 273,
    fork 57 -, fsconfig 431 431, fsmount 432 432, fsopen 430 430, fspick 433 433, init_module 175 105,
    io_uring_enter 426 426, io_uring_register 427 427, io_uring_setup 425 425, ioctl 16 29, ioperm 173 -, iopl 172 -,
    ioprio_set 251 30, kcmp 312 272, kexec_file_load 320 294, kexec_load 246 104, keyctl 250 219, kill 62 129,
    memfd_create 319 279, memfd_secret 447 447, migrate_pages 256 238, mount_setattr 442 442, mount 165 40,
    move_mount 429 429, move_pages 279 239, mq_open 240 180, msgget 68 186, open_by_handle_at 304 265,
    open_tree 428 428, perf_event_open 298 241, pidfd_getfd 438 438, pidfd_send_signal 424 424, pivot_root 155 41,
    prlimit64 302 261, process_madvise 440 440, process_mrelease 448 448, process_vm_readv 310 270,
    process_vm_writev 311 271, ptrace 101 117, quotactl 179 60, reboot 169 142, request_key 249 218,
    rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, sched_setaffinity 203 122, sched_setattr 314 274,
    sched_setparam 142 118, sched_setscheduler 144 119, seccomp 317 277, semget 64 190, setdomainname 171 162,
    sethostname 170 161, setns 308 268, setpriority 141 140, setrlimit 160 164, settimeofday 164 170, shmget 29 194,
    socketpair 53 199, socket 41 198, swapoff 168 225, swapon 167 224, syslog 103 116, tgkill 234 131, tkill 200 130,
    umount2 166 39, unshare 272 97, userfaultfd 323 282, vfork 58 -
"""


def numbers(machine: str | None = None) -> dict[str, int]:
    """Return name -> number on this machine; empty on an unknown architecture."""
    machine = machine or os.uname().machine
    if machine not in AUDIT_ARCH:
        return {}
    column = list(AUDIT_ARCH).index(machine)
    rows = [row.split() for row in _NUMBERS.split(",")]
    return {name: int(columns[column]) for name, *columns in rows if columns[column] != "-"}
