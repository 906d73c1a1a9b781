"""Plays episodes of a job with the base model: an evaluation of a local run, which is stopped before it trains.

The sampling is that of training. Invariant: when `play_model` returns or raises, no process that it started is alive.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from rljob_api.errors import TransientError
from rljob_api.manifest.job import RLJob
from rljob_api.run.folder import TRAJECTORIES, list_trajectory_files
from rljob_cli.local.network import claim_block
from rljob_cli.run import runfolder
from rljob_cli.run.command import STOPPED, Run
from rljob_cli.run.live import PlainOutput


def play_model(job: RLJob, folder: Path, claims: Mapping[str, Path], block: str | None, console: Console) -> str:
    """Play one episode for each row of data.eval; they are then in the trajectory log of `folder`.

    Return the phase: Interrupted after a signal. Raise TransientError if the run ends before the episodes do.
    """
    network = claim_block(str(folder), block)
    runfolder.prepare(folder, job)

    def has_played() -> bool:
        return bool(list_trajectory_files(folder / TRAJECTORIES))

    run = Run(job, folder, network, claims, PlainOutput(console), until=has_played)
    phase = asyncio.run(run.execute())
    if phase not in (STOPPED, "Interrupted"):
        raise TransientError(
            f"the run ended before its first episodes: {run.message or phase}; logs: {folder / 'logs'}"
        )
    return phase
