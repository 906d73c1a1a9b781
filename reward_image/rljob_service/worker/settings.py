"""The settings of a function, sent to its workers at their start. Standard library only."""

from typing import Any, NamedTuple

MODULE_NAME = "rljob_reward_function"
"""Name of the module that a function's source becomes. A file of that name lets other processes import it."""


SCORE, USER, TOOLS, EPISODES = "score", "user", "tools", "episodes"
SERVES = (SCORE, USER, TOOLS, EPISODES)
"""What a server executes: rewards, a simulated user, functions that the policy calls, or episodes of a program or an
environment."""
WORKER, REQUEST = "worker", "request"
CODE_MODULE = "rljob_service.worker.code.code_sandbox"
"""Runs code of the policy."""
TEARDOWN_SECONDS = 5.0
"""For which an episode that must end (its time is over, its client has left) may run its `finally` blocks."""


class FunctionSettings(NamedTuple):
    """Everything that a worker needs to load a function. Field names enter the reward's version: do not rename them."""

    source: str
    path: str
    """Path of the source, for messages, tracebacks and imports of files next to it."""
    entrypoint: str | None
    """The name; for several functions their names, with ", " between them."""
    signature: str
    kwargs: dict[str, Any]
    max_memory_bytes: int
    """Address space of a process."""
    module: str | None = None
    """An installed module instead of source."""
    max_file_bytes: int = 256 << 20
    """Limit of each file, and of all in the scratch directory."""
    max_processes: int = 128
    network: bool = False
    cpu_seconds: int | None = None
    requirements: tuple[str, ...] = ()
    """Packages that are installed for `python`."""
    python: str = ""
    """Interpreter with the requirements. Empty: the server's."""
    scratch: str = ""
    """Folder for the workers' directories. Empty: a temporary folder."""
    scope: str = "sample"
    """sample, group, or sampleThenGroup."""
    columns: dict[str, str] = {}
    """From parameters to the values that they get."""
    factory_args: dict[str, Any] | None = None
    """Arguments of an entry point that returns the function. None: it is the function."""
    import_timeout_seconds: float = 300.0
    max_requests: int | None = None
    """Requests after which a worker is replaced. None: no limit."""
    spare_workers: int = 1
    """Ready workers beyond the slots, which replace others at once."""
    serves: str = SCORE
    """score, user, tools, or episodes."""
    framework: str = ""
    """The project whose environment plays the episodes. Empty: a program."""
    adapter: str = ""
    """The module of its plugin."""
    seats: tuple[str, ...] | None = None
    """agent.seats: the names of those that train. None: the environment decides."""
    signatures: dict[str, str] = {}
    """The installed plugins of signatures: what each name refers to (rljob_api.functions.plugins)."""
    folders: tuple[str, ...] = ()
    """Other folders that workers must be able to read."""
    isolation: str = WORKER
    """worker or request: what has a separate process."""
    per_process: int = 1
    """Requests that one worker executes at once, as coroutines of one event loop (episodesPerProcess)."""

    @property
    def is_shared(self) -> bool:
        """Whether a worker executes several requests at once."""
        return self.per_process > 1

    @property
    def process_limit(self) -> int:
        """The most processes and threads of one worker, except its main thread."""
        return self.max_processes + (self.isolation == REQUEST) + (self.per_process if self.is_shared else 0)

    @property
    def runs_code_of_policy(self) -> bool:
        """Whether calls run code of the policy in processes of the worker, which can end it."""
        return self.module == CODE_MODULE and (self.factory_args or {}).get("provider") == "process"


SCORE_NEUTRAL_FIELDS = (
    *("path", "python", "scratch", "import_timeout_seconds", "max_requests", "spare_workers", "folders", "isolation"),
    *("adapter", "seats", "signatures", "per_process"),
)
"""Where and how long a function runs, and where plugins are: not part of the reward's version."""
