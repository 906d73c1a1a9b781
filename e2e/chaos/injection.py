"""Injects a fault of the plan into a running job. The harness of the machine does it; this chooses what.

Invariant: what lasts ends after its time, while the caller observes.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress

from harness import Cluster, CommandError, Job, log_step

from chaos import machine
from chaos.observer import Observer
from chaos.plan import PROCESSES, Fault

IsReplaced = Callable[[], bool]


@contextmanager
def apply_fault(fault: Fault, observer: Observer) -> Iterator[IsReplaced]:
    """Within, the fault is there, for as long as it lasts: a thread ends it. Yields whether a process that was killed
    or frozen has a successor."""
    job, cluster = observer.job, observer.job.cluster
    if fault.action in ("kill", "freeze"):
        yield strike(fault, cluster, job)
    elif fault.action == "drain":
        machine.drain(cluster, job, fault.target)
        yield _nothing_to_replace
    elif fault.action == "flip-bit":
        complete = sorted(observer.folder.glob("checkpoints/step-*/COMPLETE"))
        log_step(f"{job.name}: a flipped bit in {machine.flip_bit(complete[-1].parent)}")
        yield strike(Fault("kill", "head"), cluster, job)
    else:
        with lasting(open_fault(fault, observer), fault.seconds):
            yield _nothing_to_replace


def strike(fault: Fault, cluster: Cluster, job: Job) -> IsReplaced:
    """Kill or freeze one process for good."""
    target = PROCESSES[fault.target]
    before: list[int] = job.wait_for(f"a {fault.target}", lambda: machine.find_processes(cluster, job, target))
    machine.send(before[:1], signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)

    def has_successor() -> bool:
        with suppress(CommandError):
            return is_replaced(before, machine.find_processes(cluster, job, target))
        return False

    return has_successor


def is_replaced(before: list[int], now: list[int]) -> bool:
    """Whether the first of the processes is gone, and another one has come."""
    return before[0] not in now and bool(set(now) - set(before))


def open_fault(fault: Fault, observer: Observer) -> AbstractContextManager[None]:
    job, cluster = observer.job, observer.job.cluster
    match fault.action:
        case "slow":
            target = PROCESSES[fault.target]
            pids = job.wait_for(f"a {fault.target}", lambda: machine.find_processes(cluster, job, target))
            return machine.stopped(pids[:1])
        case "cut":
            return machine.network_cut(*fault.target.split("-"))
        case "fill-disk":
            return machine.full_disk(observer.folder)
        case "power-off":
            return machine.node_without_power(cluster, fault.target)
        case _:
            return machine.frozen_api_server()


@contextmanager
def lasting(fault: AbstractContextManager[None], seconds: float) -> Iterator[None]:
    """Begin the fault, and end it after its time, while the body observes."""
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()

        def last() -> None:
            with fault:
                begun.set()
                time.sleep(seconds)

        end = pool.submit(last)
        begun.wait(60)
        yield
        end.result()


def _nothing_to_replace() -> bool:
    return True
