"""Wrong names and types in a Pod are found before it is applied, at the user's own field."""

import pytest

from rljob_core.plan.validate import find_problems
from tests.support.job_simulation import make_job
from tests.support.pod_templates import ACCEPTED, REFUSED


@pytest.mark.parametrize(("spec", "path", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_pod_is_reported_at_the_users_field(spec, path, message):
    problems = find_problems(make_job(**spec))
    assert len(problems) == 1, problems
    assert problems[0].startswith(path), problems[0]
    assert message in problems[0]


@pytest.mark.parametrize("spec", ACCEPTED, ids=lambda value: str(value)[:60])
def test_unusual_pod_is_accepted(spec):
    assert find_problems(make_job(**spec)) == []
