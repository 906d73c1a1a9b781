"""Types for failures of ranks: on the rank, before an error crosses Ray, and in the driver, for the whole group.

Ray passes on only the text of an unknown error, so a rank separates lost peers (RankLostError) from user errors.
"""

import logging
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from ray.exceptions import RayError, RayTaskError

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_inputs.memory.recomputation import find_stronger
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.failures.configuration import ErrorFacts, SourceAwayError, summarize
from rljob_trainer.failures.devices import DeviceMemoryError, GpuError, GpuFaultError, Remedy, find_line, find_remedy
from rljob_trainer.policy.layout import RankRows, build_micro_batches
from rljob_trainer.run_folder.client import HeadUnreachableError

log = logging.getLogger(__name__)

_COLLECTIVE_ERRORS = re.compile(
    "gloo|nccl|connection closed by peer|connection reset|broken pipe|tcpstore|timed out", re.IGNORECASE
)

Method = TypeVar("Method", bound=Callable[..., Any])


class RankLostError(TransientError):
    """A collective failed because another rank no longer exists."""


def typed_errors(method: Method) -> Method:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except GpuFaultError as error:
            error.address = args[0].address
            raise
        except RLJobError:
            raise
        except RuntimeError as error:
            import torch  # here, in a rank: the head imports none
            import torch.distributed as dist

            remedy = find_remedy(str(error))
            if isinstance(error, torch.OutOfMemoryError):
                remedy = Remedy.LESS_MEMORY
            if remedy is not None:
                raise _explain_gpu(remedy, error, method.__name__, args) from None
            if isinstance(error, dist.DistError) or _COLLECTIVE_ERRORS.search(str(error)):
                raise RankLostError(str(error).splitlines()[0]) from None
            raise

    return call  # type: ignore[return-value]


def _explain_gpu(remedy: Remedy, error: RuntimeError, method: str, args: Sequence[Any]) -> RLJobError:
    """Return the error to raise for one of a GPU in a method of a rank, whose arguments start with the rank."""
    line = find_line(str(error))
    match remedy:
        case Remedy.ELSEWHERE:
            fault = GpuFaultError(line)
            fault.address = args[0].address
            return fault
        case Remedy.LESS_MEMORY if method == "start":
            return UserError(
                f"spec.trainer: a rank ran out of GPU memory while it loaded the model: {line}; use more ranks "
                "(replicas, gpusPerReplica) or larger GPUs, or set lora"
            )
        case Remedy.LESS_MEMORY if method == "free":
            return DeviceMemoryError(
                f"spec.trainer.resources: a rank got no pinned host memory for its state: {line}; "
                "raise limits.memory, or use more ranks"
            )
        case Remedy.LESS_MEMORY if method == "restore":
            return DeviceMemoryError(
                f"spec.trainer: a rank's weights and optimizer state do not fit next to rollouts that sleep: {line}; "
                "use more ranks or larger GPUs, or set offload or lora"
            )
        case Remedy.LESS_MEMORY if method == "give_weights":
            return DeviceMemoryError(
                "spec.rollout.gpuMemoryUtilization: a rank ran out of GPU memory when it handed weights over to the "
                f"rollouts: {line}; lower it, or set weightTransfer: file"
            )
        case Remedy.LESS_MEMORY:
            return DeviceMemoryError(
                f"spec.trainer.microBatchTokens: a rank ran out of GPU memory in {method}: {line};"
                f"{_describe_largest(args)} {_suggest_recomputation(args[0])}lower microBatchTokens, or use more ranks"
            )
        case Remedy.FIX_INDEX:
            return UserError(
                f"spec.model: a check within a kernel failed in {method}: {line}; an index is out of range, such as a "
                "token id above the model's vocabulary; CUDA_LAUNCH_BLOCKING=1 in spec.trainer.env shows the line"
            )
    return GpuError(line)


def _describe_largest(args: Sequence[Any]) -> str:
    """Return the size of the largest micro-batch among the arguments of a method; empty if they have none."""
    batches = [batch for arg in args if isinstance(arg, RankRows) for batch in build_micro_batches(arg)]
    if not batches:
        return ""
    lines, length = max((batch.token_ids.shape for batch in batches), key=lambda shape: shape[0] * shape[1])
    return f" the largest micro-batch has {lines * length} tokens ({lines} x {length} with padding);"


def _suggest_recomputation(rank: Any) -> str:
    """Return the next value of the field with which a rank's update needs less memory; empty if there is none."""
    stronger = find_stronger(rank.policy.plan.recomputation)
    return f"set gradientCheckpointing: {stronger[0]}, " if stronger else ""


def group_failure(method: str, errors: Sequence[BaseException]) -> BaseException:
    """Return the error to raise for failures in `method`: a user error, else the first one that is not a lost rank, in
    one line, else the group's death."""
    causes = [error.cause if isinstance(error, RayTaskError) and error.cause else error for error in errors]
    for cause in causes:  # peers of a rank whose GPU failed report lost ranks
        if isinstance(cause, (GpuFaultError, DeviceMemoryError, GpuError)):
            died = TrainerGroupDiedError(f"a trainer rank failed ({method}): {cause}")
            died.gpu_fault = cause if isinstance(cause, GpuFaultError) else None
            died.out_of_memory = str(cause) if isinstance(cause, DeviceMemoryError) else ""
            return died
    for cause in causes:
        is_permanent = isinstance(cause, RLJobError) and not isinstance(cause, TransientError)
        if is_permanent or isinstance(cause, SourceAwayError):
            return cause
    for error, cause in zip(errors, causes, strict=True):
        if not _is_lost_rank(cause):
            log.error("a trainer rank failed in %s", method, exc_info=error)
            return TransientError(f"a trainer rank failed in {method}: {summarize(ErrorFacts.of(cause))}")
    reason = next(filter(str.strip, str(causes[0]).splitlines()), type(causes[0]).__name__)
    return TrainerGroupDiedError(f"a trainer rank died ({method}): {reason}")


def _is_lost_rank(cause: BaseException) -> bool:
    """Whether Ray lost the rank, or the rank lost a peer or the head. A RayTaskError is an error of the rank's own
    code."""
    if isinstance(cause, (RankLostError, HeadUnreachableError)):
        return True
    return isinstance(cause, RayError) and not isinstance(cause, RayTaskError)
