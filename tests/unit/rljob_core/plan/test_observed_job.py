"""What is read from Pods: termination messages, and whether the driver has ended."""

import pytest
import yaml

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.pod_settings import LocalObjectReference
from rljob_api.wire.contract import LABEL_ROLE
from rljob_core.backend import ObservedState
from rljob_core.children.common import HEAD
from rljob_core.defaults import DEFAULTS
from rljob_core.plan.observed_job import ObservedJob, driver_succeeded, extract_error_message, observe_job
from tests.paths import ROOT
from tests.support.job_simulation import JobSimulation, make_job


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (None, ""),
        ("data.train: no column 'q'\nit has: prompt, answer\n", "data.train: no column 'q'\nit has: prompt, answer"),
        ("INFO a\n" * 9 + "error: wrong\nremedy\n", "wrong\nremedy"),
        ("INFO a\n" * 9 + "gone\n", "gone"),
        ('Traceback (most recent call last):\n  File "x"\nValueError: no\n', "ValueError: no"),
        (
            'Traceback (most recent call last):\n  File "x"\npydantic.ValidationError: 1 validation error for A\n'
            "  Value error, length [type=value_error]\n    For further information visit https://x\nINFO bye\n",
            "pydantic.ValidationError: 1 validation error for A\n  Value error, length [type=value_error]",
        ),
    ],
)
def test_error_is_extracted_from_message_log_or_traceback(message, error):
    assert extract_error_message(message) == error


def test_driver_succeeded_by_its_container_while_the_pod_reports_running() -> None:
    job = RLJob.model_validate(yaml.safe_load((ROOT / "tests/data/plan/smallest/job.yaml").read_text()))

    def observe(exit_code: int) -> ObservedJob:
        statuses = [{"name": "head", "state": {"terminated": {"exitCode": exit_code}}}]
        metadata = {"name": "h", "labels": {LABEL_ROLE: HEAD}}
        pod = {"metadata": metadata, "status": {"phase": "Running", "containerStatuses": statuses}}
        return observe_job(job, ObservedState(pods=(pod,)))

    assert driver_succeeded(observe(0))
    assert not driver_succeeded(observe(1))


def test_status_keeps_the_pull_secrets_of_the_head_while_the_job_is_suspended():
    simulation = JobSimulation(make_job(imagePullSecrets=[{"name": "own"}]))
    installed = [LocalObjectReference(name="of-the-installation")]
    simulation.defaults = DEFAULTS.model_copy(update={"image_pull_secrets": installed})
    simulation.reconcile()
    assert simulation.job.status.image_pull_secrets == ["own", "of-the-installation"]
    simulation.job.spec.suspend = True
    simulation.reconcile()
    simulation.reconcile()
    assert not simulation.has_workloads()
    assert simulation.job.status.image_pull_secrets == ["own", "of-the-installation"]
