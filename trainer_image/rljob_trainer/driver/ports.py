"""What the driver needs from the trainer group, and how it fails."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from rljob_api.errors import TransientError
from rljob_api.manifest.job import RLJobSpec
from rljob_api.wire.driver_status import HungPart, TrainerChoices
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.episodes.types import TokenFacts, TrainRow, UpdateMetrics, UpdateVersions
from rljob_trainer.failures.devices import GpuFaultError
from rljob_trainer.run_folder.file_facts import Checkpoint, FileFacts


class TrainerGroupDiedError(TransientError):
    """A rank died. Close the group; a new one resumes from the last checkpoint."""

    lost_node: bool = False
    """Whether a Ray node of the group no longer exists: its Pod was evicted or restarted, or its machine is lost. The
    operator then judges what happened to the Pod, and the ranks did not fail."""
    gpu_fault: GpuFaultError | None = None
    """Whose GPU does not work, if that is why."""
    out_of_memory: str = ""
    """A message for the user, if an update ran out of device memory."""
    hung: tuple[HungPart, ...] = ()
    """The ranks that hung, if that is why."""


class FreedMemory(NamedTuple):
    """Bytes that all ranks hold of their devices; without GPUs, their resident memory."""

    before: int
    """What an update needs."""
    after: int


class Trainer(Protocol):
    """All ranks of the trainer, as one. Each method raises TrainerGroupDiedError if a rank dies.

    An update is any number of `accumulate`, then one `apply`. So a group can train as soon as it is scored, and the
    result is that of one call with all rows, up to the order of the sums.
    """

    choices: TrainerChoices
    """What the ranks decided at their start."""

    async def inspect(self, rows: Sequence[TrainRow]) -> list[TokenFacts]:
        """Return what the algorithm needs to know about the tokens before it can compute advantages."""
        ...

    async def score(self, rows: Sequence[TrainRow]) -> list[NDArray[np.float32]]:
        """Return the policy's log-probs at temperature 1, 0 for a token that was not sampled.  [rows], each [tokens]"""
        ...

    async def accumulate(self, rows: Sequence[TrainRow], versions: UpdateVersions) -> None:
        """Add the gradient of the rows' loss, a sum over tokens with each row's weight."""
        ...

    async def apply(self, denominator: float) -> UpdateMetrics:
        """Divide the gradient by `denominator`, clip it, and run one step of the optimizer. With 0, or with a gradient
        that is not finite, nothing changes but the number of updates."""
        ...

    async def follow(self, spec: RLJobSpec) -> None: ...
    async def publish(self, version: int) -> WeightManifest: ...

    async def save(self, folder: Path) -> None:
        """Return once training may continue: with spec.checkpoint.asynchronous, the ranks have a copy of their state,
        which they write to `folder`. Call `saved` before the next one."""
        ...

    async def saved(self) -> dict[str, FileFacts]:
        """Wait until all ranks have written what `save` began. Return their files, by path below the folder. Unlike the
        other methods, it may run next to one."""
        ...

    async def export(self, folder: Path, tokenizer_source: str, checkpoint: Checkpoint | None = None) -> float | None:
        """Write the model in Hugging Face format. Return how much of the adapters' update its merged weights have; None
        without adapters. `checkpoint`: the weights of this one, which the trainer then has; nothing may train after it.
        Raise DamagedCheckpointError if its files are not those that were written."""
        ...

    async def free(self) -> FreedMemory:
        """Move weights and optimizer state to host memory, and free the device's for the rollouts that share it.
        Publish before it; save and export also work after it. Does nothing the second time."""
        ...

    async def restore(self) -> None:
        """Undo `free`, before the next inspect, accumulate or publish. Does nothing without it."""
        ...

    async def offer_weights(self) -> None:
        """After `free`: let the rollouts on shared devices have the published weights, whenever one needs them, while
        `watch` runs. Does nothing if they load a file."""
        ...

    async def withdraw_weights(self) -> None:
        """Undo `offer_weights`: a rollout that still waits for weights is refused, so that it can fall asleep."""
        ...

    async def watch(self) -> NoReturn: ...
    async def close(self) -> None: ...


class Turns(Protocol):
    """Who works on the devices: the trainer, or the rollouts that share its Pods.

    A group's ranks start while the rollouts sleep, so it begins with the trainer's turn.
    """

    async def give_to_trainer(self) -> None:
        """Return once no completion of the step or of an evaluation is open, the rollouts sleep, and the trainer can
        work."""
        ...

    async def give_to_rollouts(self, manifest: WeightManifest) -> None:
        """Return once the trainer's state has left the devices, and the rollouts are awake to load `manifest`. It must
        be announced."""
        ...


class StartTrainer(Protocol):
    """Returns a trainer group that is ready. `report` gets what the start waits for. Raises DamagedCheckpointError if
    the ranks find other files than they have written."""

    async def __call__(
        self, *, generation: str, checkpoint: Checkpoint | None, report: Callable[[str], None]
    ) -> Trainer: ...
