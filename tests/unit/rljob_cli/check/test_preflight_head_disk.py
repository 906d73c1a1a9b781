"""Large checkpoints of a job without a claim."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_cli.check.preflight import check_head_disk
from tests.support.job_simulation import make_job

BILLION = 10**9


@pytest.mark.parametrize(
    ("spec", "num_parameters", "warns"),
    [
        ({}, 7 * BILLION, True),
        ({}, BILLION // 4, False),
        ({"trainer": {"lora": {"rank": 8}}}, 7 * BILLION, False),
        ({"checkpoint": {"persistentVolumeClaim": {"claimName": "runs"}}}, 7 * BILLION, False),
        ({"head": {"resources": {"requests": {"ephemeral-storage": "300Gi"}}}}, 7 * BILLION, False),
    ],
)
def test_head_that_needs_a_large_disk_is_a_warning(spec: dict[str, Any], num_parameters: int, warns: bool) -> None:
    found = list(check_head_disk(make_job(**spec), {"spec.model.source": num_parameters}))
    assert len(found) == warns
    for finding in found:
        assert finding.is_warning
        assert finding.only == "cluster"
        assert "needs 235 GiB of disk for checkpoints" in finding.message
        assert "head.resources.requests.ephemeral-storage" in finding.message


def test_model_of_unknown_size_gives_no_warning() -> None:
    assert list(check_head_disk(make_job(), {})) == []
