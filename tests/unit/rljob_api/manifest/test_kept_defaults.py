from typing import Any

from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.manifest.kept_defaults import fill_in, merge_defaults, read_defaults
from tests.support.job_simulation import make_job

JOB = make_job()
GIVEN = JOB.to_manifest(exclude_defaults=True)["spec"]


def test_spec_with_its_own_defaults_is_the_same_spec() -> None:
    filled = fill_in(RLJobSpec, GIVEN, read_defaults(JOB.spec))
    assert filled["checkpoint"]["everySteps"] == 10
    assert filled["rewards"][0]["weight"] == 1.0
    assert JOB.with_spec() == RLJob.model_validate(JOB.to_manifest() | {"spec": filled})


def test_kept_default_counts_where_the_spec_has_no_value() -> None:
    kept = {"checkpoint": {"everySteps": 7, "keep": 3}, "rewards": {"weight": 0.5}, "suspend": True}
    filled = fill_in(RLJobSpec, GIVEN | {"checkpoint": {"keep": 1}, "suspend": False}, kept)
    assert filled["checkpoint"] == {"keep": 1, "everySteps": 7}
    assert [reward["weight"] for reward in filled["rewards"]] == [0.5] * len(GIVEN["rewards"])
    assert filled["suspend"] is False


def test_null_that_a_user_has_set_stays() -> None:
    given = GIVEN | {"algorithm": {"optimizer": {"maxGradNorm": None}}}
    assert fill_in(RLJobSpec, given, read_defaults(JOB.spec))["algorithm"]["optimizer"]["maxGradNorm"] is None


def test_what_this_version_lacks_and_sections_that_are_gone_are_left_out() -> None:
    kept: dict[str, Any] = {"mood": "grim", "agent": {"user": {"replicas": 3}}, "tracing": {"samplingRatio": 1.0}}
    assert fill_in(RLJobSpec, GIVEN, kept) == GIVEN | {"agent": {}}


def test_what_is_kept_counts_and_what_is_new_is_added() -> None:
    defaults = {"checkpoint": {"everySteps": 10, "keep": 2}, "suspend": False}
    kept = {"checkpoint": {"everySteps": 7}, "mood": "grim"}
    merged = {"checkpoint": {"everySteps": 7, "keep": 2}, "suspend": False, "mood": "grim"}
    assert merge_defaults(defaults, kept) == merged
