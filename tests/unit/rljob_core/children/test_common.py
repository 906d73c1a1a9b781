"""Names of children."""

import re

from rljob_core.children.common import child_name, service_name
from tests.support.job_simulation import make_job


def test_name_of_a_reward_that_is_no_label_ends_with_a_digest():
    """TRL's users name a reward as its function. What had a valid name keeps it."""
    names = ["correct", "at-most-15-char", "at-most-15_char", "get_repetition_penalty_reward_of_40_letters"[:40]]
    job = make_job(rewards=[{"name": name, "function": {"inline": "x"}} for name in names])
    job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"name": "j" * 40})})
    found = [service_name(job, service) for service in job.spec.services]
    assert found[:2] == [f"{'j' * 40}-reward-{name}" for name in names[:2]]
    assert found[2].startswith(f"{'j' * 40}-reward-at-most-1-")
    assert len({*found}) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]{,61}[a-z0-9])?", name) for name in found)
    assert found[2] == child_name(job, "reward-at-most-15_char"), "by the name of its role, too"
