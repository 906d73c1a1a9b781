"""What the driver needs from the trainer group, and how it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from rljob_api.errors import TransientError
from rljob_api.wire.protocol import WeightManifest
from rljob_trainer.episodes.types import TokenFacts, TrainRow, UpdateMetrics, UpdateVersions
from rljob_trainer.failures.devices import GpuFaultError


class TrainerGroupDiedError(TransientError):
    """A rank died. Close the group; a new one resumes from the last checkpoint."""

    lost_node: bool = False
    """Whether a Ray node of the group no longer exists: its Pod was evicted or restarted, or its machine is lost. The
    operator then judges what happened to the Pod, and the ranks did not fail."""
    gpu_fault: GpuFaultError | None = None
    """Whose GPU does not work, if that is why."""
    out_of_memory: str = ""
    """A message for the user, if an update ran out of device memory."""


class Trainer(Protocol):
    """All ranks of the trainer, as one. Each method raises TrainerGroupDiedError if a rank dies.

    An update is any number of `accumulate`, then one `apply`. So a group can train as soon as it is scored, and the
    result is that of one call with all rows, up to the order of the sums.
    """

    async def inspect(self, rows: Sequence[TrainRow]) -> list[TokenFacts]:
        """Return what the algorithm needs to know about the tokens before it can compute advantages."""
        ...

    async def accumulate(self, rows: Sequence[TrainRow], versions: UpdateVersions) -> None:
        """Add the gradient of the rows' loss, a sum over tokens with each row's weight."""
        ...

    async def apply(self, denominator: float) -> UpdateMetrics:
        """Divide the gradient by `denominator`, clip it, and run one step of the optimizer. With 0, or with a gradient
        that is not finite, nothing changes but the number of updates."""
        ...

    async def set_steps(self, steps: int) -> None: ...
    async def publish(self, version: int) -> WeightManifest: ...

    async def save(self, folder: Path) -> None:
        """Return once training may continue: with spec.checkpoint.asynchronous, the ranks have a copy of their state,
        which they write to `folder`. Call `saved` before the next one."""
        ...

    async def saved(self) -> None:
        """Wait until all ranks have written what `save` began. Unlike the other methods, it may run next to one."""
        ...

    async def export(self, folder: Path, tokenizer_source: str) -> None: ...
    async def watch(self) -> NoReturn: ...
    async def close(self) -> None: ...


class StartTrainer(Protocol):
    """Returns a trainer group that is ready. `report` gets what the start waits for."""

    async def __call__(self, *, generation: str, checkpoint: Path | None, report: Callable[[str], None]) -> Trainer: ...
