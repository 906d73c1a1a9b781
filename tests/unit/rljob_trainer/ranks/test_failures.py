"""Types of errors on a rank, and of failures of a whole group."""

import pytest
import torch
from ray.exceptions import RayActorError

from rljob_api.errors import TransientError, UserError
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.ranks.failures import RankLostError, group_failure, typed_errors


def test_group_failure_prefers_a_user_error_over_lost_ranks():
    error = UserError("lower microBatchTokens")
    assert group_failure("update", [RankLostError("gloo"), error]) is error


def test_group_failure_is_a_dead_group_when_ranks_are_lost():
    assert isinstance(group_failure("update", [RayActorError(), RankLostError("gloo")]), TrainerGroupDiedError)


def test_group_failure_reports_an_unknown_error_in_one_line_and_logs_its_traceback(caplog):
    bug = RuntimeError("mat1 and mat2\nshapes")
    failure = group_failure("update", [RankLostError("gloo"), bug])
    assert isinstance(failure, TransientError)
    assert not isinstance(failure, TrainerGroupDiedError), "a new group would fail likewise"
    assert str(failure) == "a trainer rank failed in update: mat1 and mat2"
    assert caplog.records[0].exc_info[1] is bug


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234"), RankLostError),
        (torch.OutOfMemoryError("CUDA out of memory"), UserError),
        (RuntimeError("shapes cannot be multiplied"), RuntimeError),
    ],
)
def test_errors_of_a_rank_get_their_type(raised, expected):
    @typed_errors
    def fail() -> None:
        raise raised

    with pytest.raises(expected) as caught:
        fail()
    assert type(caught.value) is expected
