"""Messages of the weight synchronization, and of engines in the trainer's Pods."""

from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field

from rljob_api.wire.base import Wire
from rljob_api.wire.contract import SERVED_MODEL_NAME
from rljob_api.wire.text import Count, Seconds


class WeightVersion(Wire):
    """Identifies weights. Head and rollouts may run different versions: what one does not know is left out."""

    model_config = ConfigDict(extra="ignore")

    generation: str
    """Identifies one incarnation of the trainer group. Versions of different generations are not comparable."""
    version: int
    """Incremented by each update within a generation."""

    @property
    def key(self) -> str:
        return f"{self.generation}:{self.version}"


DigestUnit = Literal["element", "word"]


class LocalFile(Wire):
    """Identifies a file for other processes of the same machine, in any mount namespace."""

    boot_id: str
    """Boot id of the kernel that runs."""
    path: str
    device: int
    inode: int


class WeightManifest(WeightVersion):
    """The newest published weights. The head serves the manifest, rank 0 of the trainer the file. Without a file, each
    rank hands the weights to the engines on its device."""

    url: str = ""
    """URL of the safetensors file. Requires the token. Empty without a file."""
    num_bytes: int
    """Size of the file, or of all weights."""
    file_hash: str = ""
    """Hash of the file, for integrity alone (see the trainer's weights.checksum). Empty without a file."""
    checksum: str
    """Digest of the parameters, independent of fusing and layout (see the trainer's weights.checksum)."""
    digest_unit: DigestUnit = "element"
    """What the digest of the parameters counts."""
    local: LocalFile | None = None
    """The file, for replicas that can see it."""
    merged_share: float | None = None
    """How much of the adapters' update the merged weights have. Null: nothing was merged, or there is no update yet."""
    peers: list[str] = []
    """Replicas (host:port) that may have parts of the file, at the same path. Empty for a replica that shares no
    downloads: it announces no address with its poll (`peer`)."""


OWN_WEIGHTS: Final = WeightManifest(generation="model", version=0, url="", num_bytes=0, file_hash="", checksum="")
"""What the rollouts of a job without a trainer serve: spec.model, as its files have it. There is no file to pull."""

Bytes = Annotated[int, Field(ge=0)]

MAX_PULL_ERROR_LENGTH = 500


class RolloutWeights(WeightVersion):
    """The weights that one rollout replica serves."""

    generation: str = ""
    """Empty while it serves the initial model."""
    version: int = -1
    file_hash: str = ""
    """Hash of the received file. A file that is read in place has that of the manifest."""
    checksum: str = ""
    """Digest read back from the parameters in the engine."""
    pause_seconds: float = 0.0
    """Time for which the last update paused generation."""
    transfer_seconds: float = 0.0
    """Time until the last update could be loaded: its download, if there was one. Not part of the pause."""
    transfer_bytes: int = 0
    """What came for the last update: less than the file where that has what changed. 0: it was read in place."""
    load_seconds: float = 0.0
    """Time to load the last update into the engine. Part of the pause."""
    error: str = ""
    """Why it does not serve the announced weights; empty while it does, or still tries for the first time."""


class PullReport(Wire):
    """What a rollout replica that does not serve the announced weights does about it. Part of its poll of the head."""

    replica: str = Field(min_length=1, max_length=256)
    """Its address."""
    key: str = Field(min_length=1, max_length=256)
    """GENERATION:VERSION of the announced weights."""
    progress: Bytes = 0
    """Received bytes of the file, and one more once it is loaded into the engine."""
    is_draining: bool = False
    """Whether the update waits for requests in flight (updateMode finish)."""
    error: str = Field(default="", max_length=MAX_PULL_ERROR_LENGTH)
    """Last error; empty without one."""


def slot_name(slot: int) -> str:
    """Return the name by which a request asks for the adapter in a slot of a service, from 1; 0: the only one.
    Names of tensors in the published file begin with that of their slot and a dot."""
    return f"{SERVED_MODEL_NAME}-{slot}" if slot else SERVED_MODEL_NAME


Turn = Literal["trainer", "rollouts"]
"""Who works on devices that trainer and rollouts share."""


class EngineMemory(Wire):
    """What a rollout replica in a trainer Pod holds after it fell asleep or woke up."""

    num_bytes: Bytes
    """In use on its GPUs, by all processes: ask while the trainer holds nothing. Without GPUs, the private memory in
    RAM of the processes with its weights and cache."""
    seconds: Seconds
    """Which the change took."""


class EnginesReport(Wire):
    """The vLLM engines of one trainer Pod after a change of turns."""

    num_running: Count
    """Those that are awake, or asleep: those that have died count again once they were restarted and are warm."""
    num_restarts: Count
    """Their restarts since the Pod's begin."""
    num_bytes: Bytes
    """Sum of EngineMemory over the rollouts."""
    model_bytes: Bytes | None = None
    """The same over the engines of served models; null without such models."""
    seconds: Seconds
    """Which the change took."""


def parse_key(key: str) -> tuple[str, int]:
    """Return generation and version. ValueError with what is wrong."""
    generation, _, version = key.rpartition(":")
    if not generation or not version.isdecimal():
        raise ValueError(f"want must be GENERATION:VERSION, got {key!r}")
    return generation, int(version)
