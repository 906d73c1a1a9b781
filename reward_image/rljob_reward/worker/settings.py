"""The settings of a function, sent to its workers at their start. Standard library only."""

from __future__ import annotations

from typing import Any, NamedTuple

MODULE_NAME = "rljob_reward_function"
"""Name of the module that a function's source becomes. A file of that name lets other processes import it."""


SCORE, USER, TOOLS, EPISODES = "score", "user", "tools", "episodes"
SERVES = (SCORE, USER, TOOLS, EPISODES)
"""What a server executes: rewards, a simulated user, functions that the policy calls, or episodes of a program or an
environment."""
CODE_MODULE = "rljob_reward.worker.code_sandbox"
"""Runs code of the policy."""
TEARDOWN_SECONDS = 5.0
"""For which an episode that must end (its time is over, its client has left) may run its `finally` blocks."""


class FunctionSettings(NamedTuple):
    """Everything that a worker needs to load a function. Field names enter the reward's version: do not rename them."""

    source: str
    path: str
    """Path of the source, for messages, tracebacks and imports of files next to it."""
    entrypoint: str | None
    signature: str
    kwargs: dict[str, Any]
    max_memory_mib: int
    module: str | None = None
    """An installed module instead of source."""
    max_file_mib: int = 256
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
    """Of episodes: the project whose environment this is. Empty: a program."""
    folders: tuple[str, ...] = ()
    """Other folders that workers must be able to read."""

    @property
    def runs_code_of_policy(self) -> bool:
        """Whether calls run code of the policy in processes of the worker, which can end it."""
        return self.module == CODE_MODULE and (self.factory_args or {}).get("provider") == "process"


SCORE_NEUTRAL_FIELDS = (
    *("path", "python", "scratch", "import_timeout_seconds", "max_requests", "spare_workers", "folders"),
)
"""Where and how long a function runs: not part of the reward's version."""
