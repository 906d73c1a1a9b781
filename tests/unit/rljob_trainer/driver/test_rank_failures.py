"""Deaths of the trainer group that count against spec.trainer.backoffLimit."""

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.roles import TrainerRole
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.driver.rank_failures import RankFailureLog
from rljob_trainer.failures.devices import GpuFaultError

WINDOW_SECONDS = 21600


def died(*, lost_node=False):
    error = TrainerGroupDiedError("a trainer rank died (update): killed")
    error.lost_node = lost_node
    return error


def build_log(limit=2):
    return RankFailureLog(TrainerRole(backoff_limit=limit))


def record(log, now, **how):
    error = died(**how)
    log.record(error, now)
    log.check(error, now)


def test_failures_above_the_limit_within_the_window_end_the_driver():
    log = build_log()
    record(log, 0.0)
    record(log, 10.0)
    with pytest.raises(TransientError, match=r"died 3 times within 21600 s, and spec.trainer.backoffLimit is 2"):
        record(log, WINDOW_SECONDS - 1.0)
    assert log.report.count == 3


def test_failures_of_different_windows_are_not_added_up():
    log = build_log()
    for number in range(100):
        record(log, number * WINDOW_SECONDS / 2)
    assert log.report.count == 100, "the operator gets all, and applies the window itself"


def test_death_of_a_group_that_lost_a_node_never_counts():
    log = build_log(0)
    for now in range(100):
        record(log, float(now), lost_node=True)
    assert (log.report.count, log.report.last) == (0, "")
    with pytest.raises(TransientError, match="died 1 times"):
        record(log, 100.0)
    record(log, 101.0, lost_node=True)


def out_of_memory():
    error = died()
    error.out_of_memory = "spec.trainer.microBatchTokens: a rank ran out of GPU memory"
    return error


def test_memory_that_the_first_step_lacks_is_the_users():
    with pytest.raises(UserError, match=r"^spec\.trainer\.microBatchTokens: "):
        build_log().check_memory(out_of_memory(), 0)


def test_memory_that_one_later_step_lacks_twice_is_the_users():
    log = build_log()
    log.check_memory(out_of_memory(), 7)
    log.check_memory(died(), 7)
    log.check_memory(out_of_memory(), 8)
    with pytest.raises(UserError):
        log.check_memory(out_of_memory(), 8)


def test_pods_with_broken_gpus_are_reported_newest_first_also_if_their_node_is_lost():
    log = build_log()
    for address, lost_node in (("10.0.0.1", False), ("10.0.0.2", True), ("10.0.0.1", False)):
        error = died(lost_node=lost_node)
        error.gpu_fault = GpuFaultError("CUDA error: uncorrectable ECC error encountered")
        error.gpu_fault.address = address
        log.record(error, 0.0)
    log.record(died(), 1.0)
    faults = log.report.gpu_faults
    assert [fault.address for fault in faults] == ["10.0.0.1", "10.0.0.2"]
    assert faults[0].message == "GPU fault: CUDA error: uncorrectable ECC error encountered"
    assert log.report.count == 3
