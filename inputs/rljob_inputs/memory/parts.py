"""What holds memory: parts, the moments at which they are held together, and the devices that need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Resource = Literal["gpu", "host"]
"""gpu: the memory of one GPU. host: the memory of one Pod, with what it has in /dev/shm."""


@dataclass(frozen=True)
class Part:
    name: str
    num_bytes: int
    is_certain: bool = False
    """Whether it is held whatever the data is. Otherwise: with full micro-batches or of the longest texts."""
    is_estimate: bool = False
    """Whether it was measured on one machine or is an experience, where the others follow from shapes."""


@dataclass(frozen=True)
class Moment:
    """Parts that are held at the same time."""

    name: str
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def plus(self, *parts: Part) -> Moment:
        """Return the same moment, at which these parts are held, too."""
        return build_moment(self.name, [*self.parts, *parts])


@dataclass(frozen=True)
class Need:
    """The memory of one GPU of a role, or of one of its Pods."""

    role: str
    """head, trainer, rollout, reward NAME or agent NAME."""
    path: str
    """Field of the role in the manifest, such as spec.trainer."""
    resource: Resource
    count: int
    """GPUs or Pods that need this much."""
    moments: tuple[Moment, ...]
    available: int | None = None
    """Bytes of the GPU, or of resources.limits.memory. None: unknown."""
    is_shared: bool = False
    """Whether these are the trainer's GPUs, whose need contains this one. Of rollouts in the trainer's Pods, it is what
    vLLM may use there."""

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @property
    def num_bytes(self) -> int:
        return self.peak.num_bytes

    @property
    def certain_bytes(self) -> int:
        """What is needed whatever the data is. An estimate is never certain."""
        return max(
            sum(part.num_bytes for part in moment.parts if part.is_certain and not part.is_estimate)
            for moment in self.moments
        )

    @property
    def fits(self) -> bool | None:
        """None: the memory is unknown."""
        return None if self.available is None else self.num_bytes <= self.available

    @property
    def cannot_fit(self) -> bool:
        """Whether it surely does not fit."""
        return self.available is not None and self.certain_bytes > self.available


def build_moment(name: str, parts: Sequence[Part]) -> Moment:
    """Leave out parts of no size."""
    return Moment(name, tuple(part for part in parts if part.num_bytes))
