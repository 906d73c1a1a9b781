"""`rljob report`, and the report that `rljob run` writes at its end."""

import subprocess
import sys
import webbrowser
from datetime import datetime
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.run.folder import FILE_REPORT
from rljob_cli.options import ReportOptions
from rljob_cli.output import say
from rljob_cli.report.collect import collect_run
from rljob_cli.report.page import render_page
from rljob_cli.run.runfolder import is_in_use
from rljob_cli.trajectories.log import find_run
from rljob_inputs.machine.installation import require


def report_command(options: ReportOptions) -> int:
    """With a target, the run is that of a job in a cluster."""
    require("rljob report", "data")
    run, output = options.run, options.file
    if output is not None and output.suffix not in (".html", ".htm"):
        raise UserError(f"--to must be a file that ends with .html, got {output}")
    if options.should_send:
        if options.target:
            raise UserError("--send is for a run on this machine; copy its folder")
        require("rljob report --send")
        if is_in_use(folder := find_run(run, options.directory)):
            raise UserError(f"{folder} is in use; its run sends what it can until its end")
        subprocess.run([sys.executable, "-m", "rljob_trainer.history.tracking", str(folder)], check=True)
    if not options.target:
        return _write(find_run(run, options.directory), output, options.should_open)
    from rljob_cli.cluster.commands import with_copy

    path = output or Path(f"{run}.html")
    return with_copy(options.target, run, lambda file: True, lambda copy: _write(copy, path, options.should_open))


def _write(folder: Path, output: Path | None, should_open: bool) -> int:
    path = write_report(folder, output)
    print(path)
    if should_open and not webbrowser.open(path.as_uri()):
        say(f"no browser was found; open {path.as_uri()}")
    return 0


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write the page of a run; by default next to its summary. Return its absolute path."""
    path = (path or folder / FILE_REPORT).absolute()
    path.write_text(render_page(collect_run(folder), datetime.now().astimezone()), encoding="utf-8")
    return path
