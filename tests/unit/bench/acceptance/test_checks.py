"""The steps of `make accept-gpu`: within eight minutes, alone, and jobs that are valid with their fields."""

from __future__ import annotations

import itertools

import pytest
from acceptance.checks import MAX_SECONDS, ROOT, build_checks

from rljob_cli.check.jobfile import load
from rljob_core.plan.validate import find_problems


def test_steps_take_at_most_eight_minutes_and_have_names_that_are_words(tmp_path):
    checks = build_checks(True, tmp_path)
    assert all(0 < check.seconds <= MAX_SECONDS for check in checks)
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").isalpha() for name in names), "ONLY= divides them at commas and spaces"


def test_steps_share_no_folder_of_runs(tmp_path):
    folders = [
        {command[command.index("--dir") + 1] for command in check.commands if "--dir" in command}
        for check in build_checks(True, tmp_path)
    ]
    assert sum(map(len, folders)) == len(set().union(*folders)) > 0


def test_reduced_form_has_the_same_steps_and_less_to_do(tmp_path):
    on_gpu, reduced = build_checks(True, tmp_path), build_checks(False, tmp_path)
    assert [check.name for check in reduced] == [check.name for check in on_gpu]
    assert not any("--gpu" in command for check in reduced if not check.needs_gpu for command in check.commands)


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
