"""env:// sources: the rows that the job's environment has or makes become files of the run, and are then data like any
other. Owns the connection to the runner and what the status shows meanwhile; row_reading owns the files."""

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial

from rljob_api.manifest.job_spec import JobSpec
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.run.folder import last_checkpoint
from rljob_api.run.rows import rows_file
from rljob_api.wire.driver_status import DriverStatus
from rljob_trainer.calls.rows import RowsClient
from rljob_trainer.concurrency import run_in_thread
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.head.environment import Environment
from rljob_trainer.head.row_reading import RowReading, list_wanted
from rljob_trainer.history.disk import RunDisk
from rljob_trainer.replicas.http import open_session

log = logging.getLogger(__name__)


async def place_rows(environment: Environment, spec: JobSpec, board: StatusBoard, disk: RunDisk) -> Environment:
    """Return the environment with a file of the run's folder in the place of each env:// source. Raise InputError if
    the job's environment has no usable rows."""
    trained = {each.path for each in spec.data.train_sources}
    sources = {path: source for path, source in spec.env_sources.items() if spec.trains or path not in trained}
    is_resumed = last_checkpoint(environment.run_dir) is not None
    wanted = list_wanted(sources)
    begin = partial(RowReading, environment.run_dir, disk=disk, is_resumed=is_resumed)
    readings = [await run_in_thread(begin, each) for each in wanted]  # a resumed one reads its file, of up to 4 GiB
    missing = [each for each in readings if not each.is_complete]
    if missing:
        async with _open_runner(spec, board, missing) as runner:
            for each in missing:
                await each.read(runner)
    for each in readings:
        log.info("%s.source: env://%s: %d rows", each.wanted.field, each.wanted.split, len(each.lines))
    files = {f"env://{each.split}": str(rows_file(environment.run_dir, each.split)) for each in wanted}
    return replace(
        environment,
        train_data=tuple(files.get(each, each) for each in environment.train_data),
        held_out_data={name: files.get(each, each) for name, each in environment.held_out_data.items()},
    )


@contextlib.asynccontextmanager
async def _open_runner(spec: JobSpec, board: StatusBoard, readings: Sequence[RowReading]) -> AsyncIterator[RowsClient]:
    """Yield a client of the runner, and show what is read in the status meanwhile."""
    service = next(each for each in spec.services if each.kind == "runner")
    async with open_session() as session:
        client = RowsClient(service, session, board.outages)

        def describe(status: DriverStatus) -> DriverStatus:
            reading = next((each for each in readings if not each.is_complete), readings[-1])
            what = f"reads the rows of {client.environment}, env://{reading.wanted.split}"
            status.waits_for = f"{what}: {len(reading.lines)} so far{client.describe_wait()}"
            status.demand = {RUNNER_SERVICE: client.demand()}
            return status

        await client.start()
        try:
            with board.live(describe):
                yield client
        finally:
            await client.close()
