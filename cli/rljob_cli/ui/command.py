"""`rljob ui`, of runs on this machine or in a cluster."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from rljob_cli.options import Target
from rljob_cli.ui.runs import RunList
from rljob_cli.ui.server import serve
from rljob_inputs.machine.installation import require


def ui_command(runs: Sequence[str], directory: Path, port: int, *, should_open: bool, target: Target) -> int:
    """With a target, the runs are those of jobs in a cluster."""
    require("rljob ui", "data")
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # the pool of its own keeps 10 MB of what was freed
    if not target:
        return asyncio.run(serve(RunList(runs, directory).read, port, should_open))
    from rljob_cli.ui.cluster import ui_of_jobs

    return ui_of_jobs(target, runs, port, should_open)
