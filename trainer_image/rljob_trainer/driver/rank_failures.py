"""How often the trainer group died through its own fault, within a window. Pure; the caller has the clock.

A backstop to the operator, which applies the same limit to what /status reports, and also counts failed containers.
"""

from collections import deque
from datetime import UTC, datetime

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.roles import TrainerRole
from rljob_api.wire.driver_status import MAX_GPU_FAULTS, GpuFault, RankFailures
from rljob_trainer.driver.ports import TrainerGroupDiedError


class RankFailureLog:
    def __init__(self, trainer: TrainerRole) -> None:
        self._limit, self._window_seconds = trainer.backoff_limit, trainer.backoff_window.total_seconds()
        self._times: deque[float] = deque(maxlen=self._limit + 1)
        self._out_of_memory_at: int | None = None
        self.report = RankFailures()
        """All failures of this process, for /status."""

    def record(self, error: TrainerGroupDiedError, now: float) -> None:
        """Count a death at `now`, in seconds of a monotonic clock, unless the group lost a node."""
        faults = self._add_fault(error)
        if not error.lost_node:
            self._times.append(now)
            self.report = RankFailures(count=self.report.count + 1, last=str(error), gpu_faults=faults)
        else:
            self.report = self.report.model_copy(update={"gpu_faults": faults})

    def _add_fault(self, error: TrainerGroupDiedError) -> list[GpuFault]:
        faults, fault = self.report.gpu_faults, error.gpu_fault
        if fault is None:
            return faults
        new = GpuFault(address=fault.address, at=datetime.now(UTC), message=str(fault))
        return [new, *(old for old in faults if old.address != fault.address)][:MAX_GPU_FAULTS]

    def check_memory(self, error: TrainerGroupDiedError, step: int) -> None:
        """Raise UserError if the group ran out of device memory before its first step, or twice in the same one. After
        `step` finished steps, a new process may fit: it begins without the fragments of the old one's memory."""
        if not error.out_of_memory:
            return
        if step in (0, self._out_of_memory_at):
            raise UserError(error.out_of_memory) from error
        self._out_of_memory_at = step

    def check(self, error: TrainerGroupDiedError, now: float) -> None:
        """Raise TransientError if there were more than the limit within the window."""
        if not error.lost_node and len(self._times) > self._limit and now - self._times[0] < self._window_seconds:
            raise TransientError(
                f"the trainer group died {len(self._times)} times within {self._window_seconds:.0f} s, and "
                f"spec.trainer.backoffLimit is {self._limit}: {error}"
            ) from error
