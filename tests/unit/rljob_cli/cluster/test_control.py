from datetime import UTC, datetime
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_api.wire.contract import ANNOTATION_RETRY
from rljob_cli.cluster.control import plan_resume, plan_retry, plan_suspend

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def job(phase: str = "Running", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "ns", "name": "sums"}, "spec": spec, "status": {"phase": phase}}


def test_suspend_and_resume_patch_only_their_field() -> None:
    assert plan_suspend(job()).patch == {"spec": {"suspend": True}}
    assert plan_resume(job("Suspended", suspend=True)).patch == {"spec": {"suspend": False}}


def test_job_already_in_the_requested_state_is_not_patched() -> None:
    assert plan_suspend(job("Suspended", suspend=True)).patch is None
    assert plan_resume(job()).patch is None


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
@pytest.mark.parametrize("plan", [plan_suspend, plan_resume])
def test_finished_job_is_neither_suspended_nor_resumed(plan: Any, phase: str) -> None:
    with pytest.raises(UserError, match=phase.lower()):
        plan(job(phase))


def test_job_of_another_controller_is_not_patched() -> None:
    foreign = job("Failed", managedBy="kueue.x-k8s.io/multikueue")
    for plan in (plan_suspend, plan_resume, lambda j: plan_retry(j, NOW)):
        with pytest.raises(UserError, match="multikueue"):
            plan(foreign)


def test_only_a_failed_job_is_retried() -> None:
    assert plan_retry(job("Failed"), NOW).patch == {"metadata": {"annotations": {ANNOTATION_RETRY: NOW.isoformat()}}}
    with pytest.raises(UserError, match="this one is Running"):
        plan_retry(job("Running"), NOW)
