"""`rljob report`, and the report that `rljob run` writes at its end."""

from __future__ import annotations

import webbrowser
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api.errors import UserError
from rljob_api.run.folder import FILE_REPORT
from rljob_cli.exits import guard
from rljob_cli.output import say
from rljob_cli.report.collect import collect_run
from rljob_cli.report.page import render_page
from rljob_cli.trajectories.index import ORDER_BY, Query
from rljob_cli.trajectories.log import find_run
from rljob_inputs.machine.installation import require

if TYPE_CHECKING:
    from rljob_cli.cluster.client import Target


@guard
def report_command(
    run: str,
    directory: Path,
    output: Path | None,
    *,
    should_open: bool,
    reason: str | None = None,
    sort: str | None = None,
    target: Target | None = None,
) -> int:
    """`target`: the run is that of a job in a cluster."""
    require("data", "rljob report")
    if output is not None and output.suffix not in (".html", ".htm"):
        raise UserError(f"--output must be a file that ends with .html, got {output}")
    query = Query(reason=reason or "", order=ORDER_BY[sort] if sort else "") if reason or sort else None
    if target is None:
        return _write(find_run(run, directory), output, query, should_open)
    from rljob_cli.cluster.commands import with_copy

    path = output or Path(f"{run}.html")
    return with_copy(target, run, lambda file: True, lambda copy: _write(copy, path, query, should_open))


def _write(folder: Path, output: Path | None, query: Query | None, should_open: bool) -> int:
    path = write_report(folder, output, query)
    print(path)
    if should_open and not webbrowser.open(path.as_uri()):
        say(f"no browser was found; open {path.as_uri()}")
    return 0


def write_report(folder: Path, path: Path | None = None, query: Query | None = None) -> Path:
    """Write the page of a run; by default next to its summary, with the samples that say most. Return its absolute
    path."""
    path = (path or folder / FILE_REPORT).absolute()
    path.write_text(
        render_page(collect_run(folder, query), datetime.now().astimezone(), order=query.order if query else ""),
        encoding="utf-8",
    )
    return path
