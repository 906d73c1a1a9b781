"""A fault at every API write of a job's life, on a real API server: whatever fails when, the world converges.

`make test-convergence` runs all of them and writes a report; the other suites run a seeded sample. See `convergence`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_core.kube import client
from tests.integration.apiserver import convergence
from tests.integration.apiserver.convergence import FAULTS, Case
from tests.integration.apiserver.test_operator_machine import machine  # noqa: F401 - a fixture

SEED = int(os.environ.get("RLJOB_SEED", "0"))
REPORTS = os.environ.get("RLJOB_CONVERGENCE_DIR", "")


@pytest.fixture
def lives(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Iterator[Case]]:  # noqa: F811
    """Run lives, each with a new operator in a new namespace."""
    monkeypatch.setattr(client, "REQUEST_TIMEOUT_SECONDS", 1.0)

    def run(fault: str, writes: list[int], counts: dict[str, int]) -> Iterator[Case]:
        for write in writes:
            running = machine()
            try:
                yield from convergence.live(running, fault, write, counts)
            finally:
                running.operator.stop()
                running.admin.core.delete_namespace(running.namespace)

    return run


@pytest.fixture
def counts(machine: Any) -> dict[str, int]:  # noqa: F811
    """The writes of each phase of an undisturbed life."""
    running = machine()
    try:
        return convergence.count_writes(running)
    finally:
        running.operator.stop()
        running.admin.core.delete_namespace(running.namespace)


@pytest.mark.slow
def test_sampled_fault_of_a_life_converges(lives: Callable[..., Iterator[Case]]) -> None:
    chosen = random.Random(SEED)
    fault, write = chosen.choice(FAULTS), chosen.randint(1, 4)
    cases = list(lives(fault, [write], dict.fromkeys(convergence.PHASES, write)))
    print(convergence.format_report(cases))
    assert any(case.was_injected for case in cases)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_at_every_write_of_a_life_converges(
    fault: str, lives: Callable[..., Iterator[Case]], counts: dict[str, int]
) -> None:
    cases = list[Case]()
    try:
        for case in lives(fault, list(range(1, max(counts.values()) + 1)), counts):
            cases.append(case)
    finally:
        print(f"\n{convergence.format_report(cases)}")
        if REPORTS:
            name = f"{fault.replace(' ', '-')}.json"
            convergence.write_report(Path(REPORTS) / name, cases, counts, SEED)
    assert sum(case.was_injected for case in cases) >= sum(counts.values()) / 2, "most faults must have struck"
