"""Python source of the user, which every kind of service may run."""

from typing import Annotated, ClassVar, Final

from pydantic import Field

from rljob_api.manifest import base
from rljob_api.manifest.base import FreeForm, ObjectName, PathText, ShortText, Spec
from rljob_api.manifest.quantity import Size, size_within

SHARES_NO_CPU_LIMIT: Final = base.Rule(
    ("episodesPerProcess", "function.cpuSeconds"),
    "must be 1 with a limit of CPU time, which a process has as a whole",
    "remove function.cpuSeconds, or episodesPerProcess",
    lambda owner: owner.episodes_per_process == 1 or owner.function is None or owner.function.cpu_seconds is None,
    "!has(self.episodesPerProcess) || self.episodesPerProcess == 1 || !has(self.function) || "
    "!has(self.function.cpuSeconds)",
)
"""For what has episodesPerProcess and a function."""


class ConfigMapKeyRef(Spec):
    """A key of a ConfigMap in the job's namespace."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: ObjectName
    """Key that holds the function's source."""


class PythonFunction(Spec):
    """Python source of the user, run in isolated worker processes: exactly one of inline, file, configMapKeyRef and
    module."""

    RULES: ClassVar[tuple[base.Rule, ...]] = (
        base.exactly_one("inline", "file", "configMapKeyRef", "module"),
        size_within("maxMemory", "64Mi"),
        size_within("maxFileSize", "1Mi"),
    )

    inline: Annotated[str, Field(min_length=1, max_length=262144)] | None = None
    """Python source of the function, at most 256 KiB."""
    file: PathText | None = None
    """Path of a Python file, which is a part of the package of its folder. With `rljob run` relative to the job file;
    on a cluster a path inside the image."""
    config_map_key_ref: ConfigMapKeyRef | None = None
    """Key of a ConfigMap that holds the source."""
    module: Annotated[str, Field(min_length=1, max_length=256, pattern=base.MODULE_PATTERN)] | None = None
    """Module to import, such as `trl.rewards`, from a package next to the job file, in requirements or in the image."""
    requirements: list[Annotated[str, Field(min_length=1, max_length=512, pattern=base.REQUIREMENT_PATTERN)]] = Field(
        default=[], max_length=256
    )
    """Packages that the function needs, as lines of a pip requirements file without options. Each Pod installs them
    once at startup, separately from the server's packages. Set the package index in env (UV_INDEX_URL,
    PIP_INDEX_URL)."""
    entrypoint: ShortText | None = None
    """Name of the function, or of a class, a list of functions, or an object. Null: of a reward the first of
    compute_score, reward_func, reward, reward_fn, rubric and reward_funcs that the source defines, else
    its only public function; with scope sampleThenGroup the first class with `compute_score` and `post_process_scores`.
    Null: of a simulated user `respond`, or the first class that has it; of tools the list `tools`, or all public
    functions."""
    factory_args: FreeForm | None = None
    """Arguments of an entry point that returns the function, such as `get_soft_overlong_punishment` of TRL, or of a
    class with `__call__`. Each worker calls it once. Null: the entry point is the function itself; a class is created
    without arguments."""
    kwargs: FreeForm = {}
    """Additional keyword arguments of each call. With scope sampleThenGroup, and for a user or tools that are a class,
    those of its constructor."""
    max_memory: Size = Size("2Gi")
    """Maximum address space of each process of the function."""
    max_file_size: Size = Size("256Mi")
    """Maximum size of each file that the function writes. The same of its scratch directory in total."""
    max_processes: int = Field(default=128, ge=0, le=100000)
    """Maximum concurrent child processes and threads of one worker. Processes that a call starts end with it."""
    max_requests: int | None = Field(default=None, ge=1)
    """Requests after which a worker process is replaced. Up to 10 % earlier, so that not all restart at once. Set it
    for a function that leaks. Null: no limit. Workers that fail repeatedly are replaced anyway."""
    spare_workers: int = Field(default=1, ge=0, le=256)
    """Ready worker processes of each Pod beyond the busy ones. They replace workers that were killed, so that a timeout
    or a crash does not cost the time of an import. Each takes the memory of an idle worker."""
    import_timeout_seconds: int = Field(default=300, ge=1, le=3600)
    """Maximum seconds of the import of the function, in each worker process. Later the import fails."""
    cpu_seconds: int | None = Field(default=None, ge=1)
    """Maximum CPU seconds of one call over all its threads, and of each process that it starts. Null: limited only by
    timeoutSeconds."""
    network: bool = False
    """Whether the function may open network connections. If false, sockets fail, and the NetworkPolicy of the reward's
    Pods blocks egress."""
