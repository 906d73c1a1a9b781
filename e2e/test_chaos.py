"""Drawn faults on a real cluster: the job succeeds, trains each prompt once, gives no false zero, and leaves nothing.

`make e2e` injects a handful; `make chaos SEED=7 FAULTS=60` draws from all. Both print a table, and one JSON object.
What is only slow, or away for a while, replaces nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from chaos import machine
from chaos.injection import apply_fault
from chaos.observer import Observer
from chaos.plan import IN_CI, QUICK, Injection, choose_faults, draw_plan
from chaos.report import Outcome, Report
from harness import NAMESPACE, Cluster, Job, log_step, python, wait_for

from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics
from rljob_cluster.host.paths import state_folder
from tests.support.prompt_order import expect_prompts

JOB = "chaos"
CLAIM = "rljob-chaos"
DISK_MEGABYTES = 512
PROMPTS_PER_STEP = 4
SEED = int(os.environ.get("RLJOB_CHAOS_SEED", "1"))
NUM_FAULTS = int(os.environ.get("RLJOB_CHAOS_FAULTS", "0"))
ONLY = [name.strip() for name in os.environ.get("RLJOB_CHAOS_ONLY", "").split(",") if name.strip()]
"""Names of faults, as in a report; empty: all."""
REPORT = os.environ.get("RLJOB_CHAOS_REPORT", "")
"""Where the report is written as JSON, after each fault; empty: nowhere."""
MINUTES = float(os.environ.get("RLJOB_CHAOS_MINUTES", "inf"))
"""After which no further fault is injected."""
INTERVAL_SECONDS = float(os.environ.get("RLJOB_CHAOS_INTERVAL", "0"))
"""Between two faults, at least."""


@pytest.fixture
def disk(cluster: Cluster) -> Iterator[Path]:
    """A claim for the run's files with a small file system."""
    if not cluster.is_local:
        pytest.skip("faults of processes, networks and disks need a cluster of this machine")
    folder = state_folder() / "volumes/chaos"
    with machine.small_disk(folder, DISK_MEGABYTES):
        python("-m", "rljob_cluster", "volume", CLAIM, folder, "--namespace", NAMESPACE)
        yield folder
        cluster.kubectl("delete", "rljob", "-n", NAMESPACE, JOB, "--ignore-not-found", "--wait")


def test_job_under_drawn_faults(cluster: Cluster, submit: Callable[..., Job], disk: Path) -> None:
    plan = draw_plan(SEED, NUM_FAULTS, choose_faults(ONLY)) if NUM_FAULTS else plan_for_ci()
    job = submit_endless(submit)
    observer = Observer(job, disk / JOB, limit_seconds=900)
    job.wait_for("two checkpoints", lambda: len(list(disk.glob(f"{JOB}/checkpoints/step-*/COMPLETE"))) >= 2)
    outcomes: list[Outcome] = []
    last = time.monotonic() + 60 * MINUTES
    for injection in plan:
        if time.monotonic() < last:
            outcomes.append(inject(injection, observer))
            write_report(job, outcomes)
    end(job, observer)
    report = write_report(job, outcomes)
    print(report.to_table())
    print(report.to_json())
    assert not report.failures()
    metrics = read_metrics(disk / JOB / FILE_METRICS)
    assert [step.step for step in metrics.steps] == list(range(1, len(metrics.steps) + 1))
    assert metrics.prompts_trained == expect_prompts(len(metrics.steps), PROMPTS_PER_STEP)
    assert not any(step.invalid_by_reason for step in metrics.steps), "a fault costs no sample"
    # The Pods of heads stay, for their logs.
    running = ("pods", "-l", f"rljob.dev/job={JOB}", "--field-selector", "status.phase!=Succeeded,status.phase!=Failed")
    wait_for("nothing that runs after the end", lambda: not cluster.get(*running)["items"], 60)


def write_report(job: Job, outcomes: list[Outcome]) -> Report:
    """Also of a run that is interrupted."""
    report = Report(SEED, outcomes, job.status["progress"].get("trainingShare"))
    if REPORT:
        Path(REPORT).write_text(report.to_json())
    return report


def plan_for_ci() -> list[Injection]:
    faults = {fault.name: fault for fault in QUICK}
    return [Injection(faults[name], delay) for name, delay in zip(IN_CI, (0.5, 1.0, 0.0, 0.0, 0.5, 0.0), strict=True)]


def submit_endless(submit: Callable[..., Job]) -> Job:
    """The tiny job, until somebody ends it. Faults are many: no role gives up because of their number."""
    patient = {"backoffLimit": 1000}
    [reward] = yaml.safe_load((Path(__file__).parent / "job.yaml").read_text())["spec"]["rewards"]
    return submit(
        JOB,
        rewards=[reward | patient],
        **dict.fromkeys(("head", "trainer", "rollout"), patient),
        schedule={"steps": 100_000, "promptsPerStep": PROMPTS_PER_STEP},
        checkpoint={"persistentVolumeClaim": {"claimName": CLAIM}, "export": "never"},
        hangDetection={"minSeconds": 30},
    )


def inject(injection: Injection, observer: Observer) -> Outcome:
    """Inject a fault while a step is in progress, and return what followed."""
    job, fault = observer.job, injection.fault
    started_at, first = time.monotonic(), observer.step()
    job.wait_for("a new step", lambda: observer.step() > first and time.monotonic() > started_at + INTERVAL_SECONDS)
    time.sleep(injection.delay)
    before, at_step = observer.look_until_answered(), observer.step()
    log_step(f"{job.name}: {fault.name} at step {at_step}")
    with apply_fault(fault, observer) as has_successor:
        outcome = observer.follow(injection, before, at_step, has_successor)
    log_step(f"{job.name}: {outcome}")
    return outcome


def end(job: Job, observer: Observer) -> None:
    """Let the job end with its next steps."""
    patch = json.dumps({"spec": {"schedule": {"steps": observer.step() + 4}}})
    job.cluster.kubectl("patch", "rljob", "-n", NAMESPACE, job.name, "--type=merge", "-p", patch)
    job.wait_for("Succeeded", lambda: job.condition("Succeeded").get("status") == "True")
