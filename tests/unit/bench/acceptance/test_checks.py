"""The checks of `make accept-gpu`: within 40 minutes, and jobs that are valid with their fields."""

from __future__ import annotations

import itertools

import pytest
from acceptance.checks import MAX_MINUTES, ROOT, build_checks, total_seconds

from rljob_cli.check.jobfile import load
from rljob_core.plan.validate import find_problems


@pytest.mark.parametrize("has_gpu", [False, True])
def test_checks_take_at_most_their_minutes_and_have_names_of_their_own(tmp_path, has_gpu):
    checks = build_checks(has_gpu, tmp_path)
    assert total_seconds(checks) <= 60 * MAX_MINUTES
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    assert all(check.after in names[: names.index(check.name)] for check in checks if check.after)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_jobs_are_valid_with_the_fields_of_the_checks(tmp_path, has_gpu):
    checks = [check for check in build_checks(has_gpu, tmp_path) if has_gpu or not check.needs_gpu]
    runs = [command for check in checks for command in check.commands if command[1] == "run"]
    assert runs
    for command in runs:
        overrides = [value for option, value in itertools.pairwise(command) if option == "--set"]
        job = load(ROOT / command[2], overrides).job
        assert not find_problems(job)
        assert job.spec.shares_trainer
        assert job.spec.trainer.gpus_per_replica == job.spec.rollout.gpus_per_replica == int(has_gpu)
