"""Numbers of system calls by architecture. Those above 423 are the same on all."""

import os

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
