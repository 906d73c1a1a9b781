"""`rljob ui`, of runs on this machine or in a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_cli.exits import guard
from rljob_cli.ui.runs import RunList
from rljob_cli.ui.serving import serve
from rljob_inputs.machine.installation import require

if TYPE_CHECKING:
    from rljob_cli.cluster.client import Target


@guard
def ui_command(
    runs: Sequence[str], directory: Path, port: int, *, should_open: bool, target: Target | None = None
) -> int:
    """`target`: the runs are those of jobs in a cluster."""
    require("data", "rljob ui")
    if target is None:
        return asyncio.run(serve(RunList(runs, directory).read, port, should_open))
    from rljob_cli.ui.cluster import ui_of_jobs

    return ui_of_jobs(target, runs, port, should_open)
