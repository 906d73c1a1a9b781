"""Types of errors on a rank, and of failures of a whole group."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError

from rljob_api.errors import TransientError, UserError
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.episodes.types import NOT_SAMPLED, TrainRow
from rljob_trainer.failures.devices import DeviceMemoryError, GpuError, GpuFaultError
from rljob_trainer.policy.layout import PLAIN, divide_rows
from rljob_trainer.ranks.failures import RankLostError, group_failure, typed_errors
from rljob_trainer.run_folder.client import HeadUnreachableError


def test_group_failure_prefers_a_user_error_over_lost_ranks():
    error = UserError("lower microBatchTokens")
    assert group_failure("update", [RankLostError("gloo"), error]) is error


def test_group_failure_is_a_dead_group_when_ranks_are_lost():
    assert isinstance(group_failure("update", [RayActorError(), RankLostError("gloo")]), TrainerGroupDiedError)


def test_group_that_cannot_send_a_checkpoint_to_the_head_is_started_again():
    """The head keeps running: without a claim, its end would cost all steps."""
    assert isinstance(group_failure("save", [HeadUnreachableError("reset by peer")]), TrainerGroupDiedError)


def test_group_failure_reports_an_unknown_error_in_one_line_and_logs_its_traceback(caplog):
    bug = RuntimeError("mat1 and mat2\nshapes")
    failure = group_failure("update", [RankLostError("gloo"), bug])
    assert isinstance(failure, TransientError)
    assert not isinstance(failure, TrainerGroupDiedError), "a new group would fail likewise"
    assert str(failure) == "a trainer rank failed in update: mat1 and mat2"
    assert caplog.records[0].exc_info[1] is bug


class Rank:
    """A rank whose methods fail."""

    address = "10.0.0.3"

    def __init__(self, error, recomputation="full"):
        self._error = error
        self.policy = SimpleNamespace(plan=SimpleNamespace(recomputation=recomputation))

    @typed_errors
    def start(self):
        raise self._error

    @typed_errors
    def accumulate(self, plan):
        raise self._error

    @typed_errors
    def free(self):
        raise self._error

    @typed_errors
    def restore(self):
        raise self._error


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234"), RankLostError),
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceMemoryError),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nadvice"), GpuFaultError),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), GpuError),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), UserError),
        (
            dist.DistBackendError("NCCL error: unhandled cuda error\nCuda failure 214 'uncorrectable ECC error'"),
            GpuFaultError,
        ),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), RankLostError),
        (RuntimeError("shapes cannot be multiplied"), RuntimeError),
    ],
)
def test_errors_of_a_rank_get_their_type(raised, expected):
    with pytest.raises(expected) as caught:
        Rank(raised).accumulate([])
    assert type(caught.value) is expected
    if expected is GpuFaultError:
        assert caught.value.address == "10.0.0.3"


@pytest.mark.parametrize(
    ("choice", "advice"),
    [
        ("none", "set gradientCheckpointing: selective, lower microBatchTokens"),
        ("selective", "set gradientCheckpointing: full, lower microBatchTokens"),
        ("full", "lower microBatchTokens"),
    ],
)
def test_memory_that_an_update_lacks_names_the_micro_batch_and_what_needs_less(choice, advice):
    row = TrainRow(
        np.arange(5), np.array([False] + [True] * 4), np.ones(5, np.float32), np.zeros(5, np.float32),
        np.array([NOT_SAMPLED] + [0] * 4, np.int32),
    )  # fmt: skip
    [part] = divide_rows([row, row], num_ranks=1, micro_batch_tokens=64, layout=PLAIN)
    with pytest.raises(DeviceMemoryError) as caught:
        Rank(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"), choice).accumulate(part)
    assert str(caught.value) == (
        "spec.trainer.microBatchTokens: a rank ran out of GPU memory in accumulate: CUDA out of memory. Tried to "
        f"allocate 2.00 GiB.; the largest micro-batch has 8 tokens (2 x 4 with padding); {advice}, or use more ranks"
    )


def test_memory_that_the_model_lacks_is_the_users_at_once():
    with pytest.raises(UserError, match=r"^spec\.trainer: .* while it loaded the model: CUDA out of memory"):
        Rank(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")).start()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("free", r"^spec\.trainer\.resources: a rank got no pinned host memory .*: CUDA error: out of memory"),
        ("restore", r"^spec\.trainer: .* do not fit next to rollouts that sleep: CUDA error: out of memory"),
    ],
)
def test_memory_that_a_change_of_turns_lacks_is_not_that_of_micro_batches(method, message):
    with pytest.raises(DeviceMemoryError, match=message):
        getattr(Rank(torch.AcceleratorError("CUDA error: out of memory")), method)()


def test_fault_of_one_gpu_is_the_reason_though_the_peers_are_lost():
    fault = GpuFaultError("CUDA error: uncorrectable ECC error encountered")
    failure = group_failure("apply", [RankLostError("nccl"), UserError("a symptom"), fault])
    assert isinstance(failure, TrainerGroupDiedError), "the head stays, and starts another group"
    assert failure.gpu_fault is fault
    assert str(failure).endswith("GPU fault: CUDA error: uncorrectable ECC error encountered")


def test_errors_of_gpus_cross_ray_with_the_pod_they_are_of():
    fault = GpuFaultError("CUDA error")
    fault.address = "10.0.0.3"
    copy = pickle.loads(pickle.dumps(fault))
    assert (str(copy), copy.address) == (str(fault), fault.address)


def test_gpu_that_does_not_start_is_reported_with_its_pod():
    with pytest.raises(GpuFaultError) as caught:
        Rank(GpuFaultError("system not yet initialized")).start()
    assert caught.value.address == "10.0.0.3"


def test_group_without_device_memory_is_started_again_with_the_users_message():
    failure = group_failure("accumulate", [DeviceMemoryError("spec.trainer.microBatchTokens: ...")])
    assert isinstance(failure, TrainerGroupDiedError)
    assert failure.out_of_memory == "spec.trainer.microBatchTokens: ..."
