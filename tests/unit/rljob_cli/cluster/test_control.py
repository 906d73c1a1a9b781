from datetime import UTC, datetime
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_api.wire.contract import ANNOTATION_RETRY
from rljob_cli.cluster.control import plan_change

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def job(phase: str = "Running", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "ns", "name": "sums"}, "spec": spec, "status": {"phase": phase}}


def test_suspend_and_resume_patch_only_their_field() -> None:
    assert plan_change("suspend", job(), NOW).patch == {"spec": {"suspend": True}}
    assert plan_change("resume", job("Suspended", suspend=True), NOW).patch == {"spec": {"suspend": False}}


def test_job_already_in_the_requested_state_is_not_patched() -> None:
    assert plan_change("suspend", job("Suspended", suspend=True), NOW).patch is None
    assert plan_change("resume", job(), NOW).patch is None


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
@pytest.mark.parametrize("verb", ["suspend", "resume"])
def test_finished_job_is_neither_suspended_nor_resumed(verb: str, phase: str) -> None:
    with pytest.raises(UserError, match=phase.lower()):
        plan_change(verb, job(phase), NOW)


def test_job_of_another_controller_is_not_patched() -> None:
    foreign = job("Failed", managedBy="kueue.x-k8s.io/multikueue")
    for verb in ("suspend", "resume", "retry"):
        with pytest.raises(UserError, match="multikueue"):
            plan_change(verb, foreign, NOW)


def test_only_a_failed_job_is_retried() -> None:
    assert plan_change("retry", job("Failed"), NOW).patch == {
        "metadata": {"annotations": {ANNOTATION_RETRY: NOW.isoformat()}}
    }
    with pytest.raises(UserError, match="this one is Running"):
        plan_change("retry", job("Running"), NOW)
