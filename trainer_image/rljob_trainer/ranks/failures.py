"""Types for failures of ranks: on the rank, before an error crosses Ray, and in the driver, for the whole group.

Ray passes on only the text of an unknown error, so a rank separates lost peers (RankLostError) from user errors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from ray.exceptions import RayError, RayTaskError

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.failures.configuration import ErrorFacts, summarize

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
        except RLJobError:
            raise
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"a trainer rank ran out of device memory: {error}; lower spec.trainer.microBatchTokens, "
                "set spec.trainer.gradientCheckpointing, or use more ranks"
            ) from None
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or _COLLECTIVE_ERRORS.search(str(error)):
                raise RankLostError(str(error).splitlines()[0]) from None
            raise

    return call  # type: ignore[return-value]


def group_failure(method: str, errors: Sequence[BaseException]) -> BaseException:
    """Return the error to raise for failures in `method`: a user error, else the first one that is not a lost rank, in
    one line, else the group's death."""
    causes = [error.cause if isinstance(error, RayTaskError) and error.cause else error for error in errors]
    for cause in causes:
        if isinstance(cause, RLJobError) and not isinstance(cause, TransientError):
            return cause
    for error, cause in zip(errors, causes, strict=True):
        if not _is_lost_rank(cause):
            log.error("a trainer rank failed in %s", method, exc_info=error)
            return TransientError(f"a trainer rank failed in {method}: {summarize(ErrorFacts.of(cause))}")
    reason = next(filter(str.strip, str(causes[0]).splitlines()), type(causes[0]).__name__)
    return TrainerGroupDiedError(f"a trainer rank died ({method}): {reason}")


def _is_lost_rank(cause: BaseException) -> bool:
    """Whether Ray lost the rank, or the rank lost a peer. A RayTaskError is an error of the rank's own code."""
    return isinstance(cause, RankLostError) or (isinstance(cause, RayError) and not isinstance(cause, RayTaskError))
