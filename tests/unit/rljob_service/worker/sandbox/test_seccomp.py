"""The filter as the kernel would interpret it: a small BPF machine runs it on calls of both architectures.

tests/process/.../test_isolation.py checks the running kernel, on the architecture of this machine.
"""

from __future__ import annotations

import errno
import socket
import struct
import termios

import pytest

from rljob_service.worker.sandbox import seccomp
from rljob_service.worker.sandbox.seccomp import ALLOW, AUDIT_ARCH, KILL, NOTIFY, numbers, refuse

OWN, SERVER, OTHER = 4000, 1, 5000
MACHINES = sorted(AUDIT_ARCH)
DENIED = refuse(errno.EPERM)
BLOCKED = refuse(errno.ENETDOWN)
MINUS_ONE = (1 << 64) - 1


def decide(machine: str, call: str | int, *arguments: int, arch: int | None = None, **policy: bool) -> int:
    """Return the filter's action for a call."""
    options = {"network": False, "supervised": True, "signals_are_scoped": False} | policy
    rules = seccomp.build_rules(OWN, SERVER, **options)
    number = numbers(machine)[call] if isinstance(call, str) else call
    padded = (*arguments, *[0] * 6)[:6]
    data = struct.pack("=IIQ6Q", number, AUDIT_ARCH[machine] if arch is None else arch, 0, *padded)
    return run(seccomp.assemble(rules, machine), data)


def run(program: bytes, data: bytes) -> int:
    accumulator, at = 0, 0
    instructions = list(struct.iter_unpack("=HBBI", program))
    while True:
        code, if_true, if_false, value = instructions[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:
            return int(value)
        else:
            assert code in (0x15, 0x45)
            true = accumulator == value if code == 0x15 else bool(accumulator & value)
            at += if_true if true else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_only_unix_streams_are_allowed_without_network(machine: str) -> None:
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):
        assert decide(machine, "socket", family, socket.SOCK_STREAM) == BLOCKED
        assert decide(machine, "socket", family, socket.SOCK_STREAM, network=True) == ALLOW
    stream, datagram = socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    for call in ("socket", "socketpair"):
        assert decide(machine, call, socket.AF_UNIX, stream) == ALLOW
        assert decide(machine, call, socket.AF_UNIX, datagram) == BLOCKED, "each message can name a path"


@pytest.mark.parametrize("machine", MACHINES)
def test_server_connects_unix_sockets_and_without_it_there_are_none(machine: str) -> None:
    assert decide(machine, "connect") == NOTIFY
    assert decide(machine, "connect", network=True) == ALLOW
    assert decide(machine, "socket", socket.AF_UNIX, socket.SOCK_STREAM, supervised=False) == BLOCKED
    assert decide(machine, "socketpair", socket.AF_UNIX, socket.SOCK_STREAM, supervised=False) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("request_name", ["TIOCSTI", "TIOCSCTTY"])
def test_input_of_a_terminal_cannot_be_faked(machine: str, request_name: str) -> None:
    assert decide(machine, "ioctl", 0, getattr(termios, request_name)) == DENIED
    assert decide(machine, "ioctl", 0, termios.TIOCGWINSZ) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_starting_a_process_or_thread_notifies_and_namespaces_are_denied(machine: str) -> None:
    threads, child, user_namespace = 0x3D0F00, 17, 0x10000011
    assert decide(machine, "clone", threads) == decide(machine, "clone", child) == NOTIFY
    assert decide(machine, "clone", child, supervised=False) == ALLOW
    assert decide(machine, "clone", user_namespace) == DENIED
    assert decide(machine, "clone3") == refuse(errno.ENOSYS), "its flags are in memory, which a filter cannot read"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("call", ["kill", "tgkill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"])
def test_signals_to_others_notify_and_to_all_are_denied(machine: str, call: str) -> None:
    assert decide(machine, call, OWN, 9) == decide(machine, call, 0, 9) == ALLOW
    assert decide(machine, call, OTHER, 9) == decide(machine, call, SERVER, 9) == NOTIFY
    assert decide(machine, call, MINUS_ONE, 9) == DENIED
    assert decide(machine, call, SERVER, 9, supervised=False) == DENIED
    assert decide(machine, call, OTHER, 9, supervised=False) == ALLOW, "it may be its own child"
    assert decide(machine, call, OTHER, 9, signals_are_scoped=True) == ALLOW, "Landlock decides"


@pytest.mark.parametrize("machine", MACHINES)
def test_limits_and_scheduling_of_others_notify_and_the_mark_cannot_change(machine: str) -> None:
    assert decide(machine, "prlimit64", 0, 7) == decide(machine, "prlimit64", OWN, 7) == ALLOW
    assert decide(machine, "prlimit64", SERVER, 7) == NOTIFY
    assert decide(machine, "prlimit64", SERVER, 7, supervised=False) == DENIED
    assert decide(machine, "prlimit64", 0, 10) == decide(machine, "setrlimit", 10) == DENIED
    assert decide(machine, "setpriority", 0, SERVER) == decide(machine, "sched_setaffinity", SERVER) == NOTIFY
    assert decide(machine, "setpriority", 2, 0) == DENIED, "all processes of the user"
    assert decide(machine, "setpriority", 0, 0) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("call", ["ptrace", "process_vm_readv", "mount", "unshare", "bpf", "keyctl", "shmget"])
def test_calls_that_no_function_needs_are_denied(machine: str, call: str) -> None:
    assert decide(machine, call) == DENIED


@pytest.mark.parametrize("machine", MACHINES)
def test_other_calls_are_allowed_and_other_architectures_killed(machine: str) -> None:
    named = set(numbers(machine).values())
    assert {decide(machine, number) for number in range(423) if number not in named} == {ALLOW}
    assert decide(machine, 0, arch=0x40000003) == KILL, "32-bit calls have other numbers"
    assert decide(machine, 0x40000000 | 41) == KILL, "x32 has other numbers, too"


@pytest.mark.parametrize("machine", MACHINES)
def test_what_a_worker_starts_cannot_signal_or_adjust_it(machine: str) -> None:
    program = seccomp.assemble(seccomp.build_guard(OWN), machine)

    def decide_guarded(call: str, *arguments: int) -> int:
        padded = (*arguments, *[0] * 6)[:6]
        return run(program, struct.pack("=IIQ6Q", numbers(machine)[call], AUDIT_ARCH[machine], 0, *padded))

    for call in ("kill", "tgkill", "prlimit64", "sched_setaffinity"):
        assert decide_guarded(call, OWN, 9) == DENIED
        assert decide_guarded(call, OTHER, 9) == ALLOW, "the policy of the worker decides"
        assert decide_guarded(call, 0, 9) == ALLOW
    assert decide_guarded("kill", -OWN & ((1 << 64) - 1), 9) == DENIED, "its process group"
    assert decide_guarded("setpriority", 0, OWN, 19) == DENIED
    assert decide_guarded("setpriority", 0, OTHER, 19) == ALLOW
