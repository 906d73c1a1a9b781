"""What is read from the Pods: a container's last words, and whether the head has ended."""

import pytest

from rljob_api.manifest.roles import HeadRole
from rljob_operator.plan.observed_job import RoleView, World, has_ended_well, what_it_said


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (None, ""),
        ("data.train: no column 'q'\nit has: prompt, answer\n", "data.train: no column 'q'\nit has: prompt, answer"),
        ("INFO a\n" * 9 + "error: wrong\nremedy\n", "wrong\nremedy"),
        ("INFO a\n" * 9 + "gone\n", "gone"),
        ('Traceback (most recent call last):\n  File "x"\nValueError: no\n', "ValueError: no"),
    ],
)
def test_the_words_that_help_are_found_in_a_message_a_log_or_a_traceback(message, said):
    assert what_it_said(message) == said


def test_a_head_whose_container_ended_well_waits_for_nobody_though_its_pod_says_running() -> None:
    def world_with(exit_code: int) -> World:
        statuses = [{"name": "head", "state": {"terminated": {"exitCode": exit_code}}}]
        pod = {"metadata": {"name": "h"}, "status": {"phase": "Running", "containerStatuses": statuses}}
        head = RoleView("head", "head", HeadRole(), 1, (pod,))
        return World({}, frozenset(), (head,), None)

    assert has_ended_well(world_with(0))
    assert not has_ended_well(world_with(1))
