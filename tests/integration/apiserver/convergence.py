"""The lives of one job with a fault at each API write of the operator, and how they ended.

A life is a fixed sequence of phases: create, run, scale, suspend, resume, fail, retry, delete; then a second job
succeeds and is deleted after its TTL. An undisturbed life counts the writes of each phase. The others have the same
fault at write number k of every phase with so many writes. After each phase the machine must settle (operator_machine):
all objects exist once, none is left over, and further reconciles write nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.apiserver.fault_proxy import TIMEOUT_FAULTS

FAULTS = ("death before", "death after", "409", "429", "500", *TIMEOUT_FAULTS)
Machine = Any
"""An instance of test_operator_machine.OperatorMachine."""
_Phase = Callable[[Machine, Any], None]


_TTL_SECONDS = 600


def _create(ttl: int | None) -> _Phase:
    return lambda machine, faults: machine.create_the_job(faults, ttl)


def _run(machine: Machine, faults: Any) -> None:
    machine.make_all_pods_ready(faults)


def _edit(path: str, value: Any) -> _Phase:
    return lambda machine, faults: machine.edit_the_spec((path, value), faults, False)


def _end(succeeds: bool) -> _Phase:
    return lambda machine, faults: machine.end_the_job(0, succeeds, faults)


def _retry(machine: Machine, faults: Any) -> None:
    machine.retry_the_job(faults)


def _delete(machine: Machine, faults: Any) -> None:
    machine.delete_the_job(faults, "Background")


def _expire(machine: Machine, faults: Any) -> None:
    machine.pass_time(_TTL_SECONDS + 1, faults)


PHASES: dict[str, _Phase] = {
    "create": _create(None),
    "run": _run,
    "scale": _edit("rollout.replicas", 3),
    "suspend": _edit("suspend", True),
    "resume": _edit("suspend", False),
    "run again": _run,
    "fail": _end(False),
    "retry": _retry,
    "delete": _delete,
    "create another": _create(_TTL_SECONDS),
    "succeed": _end(True),
    "expire": _expire,
}


@dataclass(frozen=True)
class Case:
    """One fault in one phase."""

    fault: str
    phase: str
    write: int
    was_injected: bool
    """False: the phase needed fewer writes in this life."""
    seconds: float
    """Until the phase had settled, with the fault's own delay."""


def count_writes(machine: Machine) -> dict[str, int]:
    """Live once without faults. Return the number of writes of each phase."""
    counts = {}
    for name, phase in PHASES.items():
        before = machine.operator.faults.num_writes
        phase(machine, ({}, {}))
        machine.settle()
        counts[name] = machine.operator.faults.num_writes - before
    return counts


def live(machine: Machine, fault: str, write: int, counts: dict[str, int]) -> Iterator[Case]:
    """Live with the fault at this write of each phase that has so many, and end with the last such phase. Raises if
    a phase does not settle."""
    last = max((index for index, name in enumerate(PHASES) if write <= counts[name]), default=-1)
    for name, phase in list(PHASES.items())[: last + 1]:
        has_fault = write <= counts[name]
        injected = machine.operator.faults.ever_injected
        before, started_at = injected[fault], time.monotonic()
        phase(machine, ({write: fault} if has_fault else {}, {}))
        machine.settle()
        if has_fault:
            yield Case(fault, name, write, injected[fault] > before, round(time.monotonic() - started_at, 2))


def format_report(cases: list[Case]) -> str:
    """A table: the faults by phase, and how long they took to converge."""
    by_key = defaultdict[tuple[str, str], list[Case]](list)
    for case in cases:
        by_key[case.fault, case.phase].append(case)
    lines = [
        "| fault | phase | lives | faults | seconds: median | longest |",
        "|---|---|---|---|---|---|",
    ]
    for (fault, phase), found in by_key.items():
        times = sorted(case.seconds for case in found)
        num_injected = sum(case.was_injected for case in found)
        numbers = (len(found), num_injected, times[len(times) // 2], times[-1])
        lines.append(f"| {fault} | {phase} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines)


def write_report(path: Path, cases: list[Case], counts: dict[str, int], seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"seed": seed, "writes_by_phase": counts, "cases": [case.__dict__ for case in cases]}
    path.write_text(json.dumps(found, indent=1))


def print_reports(folder: Path) -> None:
    """Print one table of all reports of a folder."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    cases = [Case(**case) for report in reports for case in report["cases"]]
    print(format_report(cases))
    print(f"{sum(case.was_injected for case in cases)} faults, all converged")


if __name__ == "__main__":
    print_reports(Path(sys.argv[1]))
