"""What the head reads before it trains: tokenizer and prompts, also while the Hub or the object storage is away.

Errors that only the user can fix are raised; a source that does not answer is waited for, and the status says so.

The rows of env:// sources, which the job's environment has or makes, become files of the run, and are then data like
any other.

    the run's folder has them, and a checkpoint --> these; only what an evaluation needs besides is read
    else                                        --> page by page from the runner --> rows/SPLIT.jsonl, and its record

Owns the files, the connection to the runner and what the status shows meanwhile. Invariant: from the first checkpoint
on, a run's rows never change, whatever the environment then returns: cursors and streaks of a checkpoint are numbers of
rows. Without a checkpoint a restarted job begins again, and reads them again.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.evaluation import HeldOutSet
from rljob_api.manifest.job_sections import DataSource, GivenSource, Model, NamedSource
from rljob_api.manifest.job_spec import JobSpec
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.run.folder import last_checkpoint
from rljob_api.run.rows import RowsRecord, digest_rows, read_lines, read_record, record_file, rows_file
from rljob_api.wire.calls import RowsReply
from rljob_api.wire.contract import MAX_ROWS_OF_PAGE
from rljob_api.wire.driver_status import DriverStatus
from rljob_inputs.data.lengths import find_limit
from rljob_inputs.data.prompts import PromptSet, load_prompts
from rljob_inputs.findings import InputError, describe_lengths
from rljob_inputs.hub import HubAccess
from rljob_inputs.models.files import place_model
from rljob_inputs.models.own_settings import ModelSettings
from rljob_inputs.objects.errors import StorageAwayError
from rljob_inputs.prompts import Prompt
from rljob_trainer.calls.client import RowsClient
from rljob_trainer.concurrency import run_in_thread
from rljob_trainer.driver.ports import StartTrainer, Trainer
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.failures.configuration import ErrorFacts, SourceAwayError, is_infrastructure_error, summarize
from rljob_trainer.feed.given_rows import GivenRows, build_given
from rljob_trainer.feed.prompt_feed import PromptSource
from rljob_trainer.head.environment import Environment
from rljob_trainer.history.disk import RunDisk, rename_durably, write_durably
from rljob_trainer.outages import Outages, name_storage, wait_out
from rljob_trainer.replicas.http import open_session
from rljob_trainer.written_tokenizer import load_written_tokenizer


def load_tokenizer(location: str, model: Model) -> Any:
    """Return transformers' tokenizer, with the chat template of the job if it has one. `location`: where this process
    finds the model, a folder, hf://org/name or s3://bucket/path. Raise UserError, and SourceAwayError if its storage
    cannot be reached."""
    try:
        name = place_model(location, weights=False)
    except StorageAwayError as error:
        raise SourceAwayError(str(error)) from error
    try:
        tokenizer = load_written_tokenizer(name, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except UserError as error:
        raise UserError(f"spec.model.source: {error}") from error
    except Exception as error:  # transformers and its hub client raise dozens of types
        if is_infrastructure_error(facts := ErrorFacts.of(error)):
            raise SourceAwayError(f"cannot load the tokenizer of {name}: {summarize(facts)}") from error
        raise UserError(f"spec.model.source: cannot load the tokenizer of {name}: {error}") from error
    if model.chat_template is not None:
        tokenizer.chat_template = model.chat_template.inline
    return tokenizer


MAX_UNKNOWN_ROWS: Final = 100_000
"""Rows without `limit` of what does not know how many it has: it may have no end."""
_MAX_BYTES: Final = 4 << 30
"""Limit of a split's rows, which the head holds in memory."""


@dataclass(frozen=True)
class Wanted:
    """The rows of one split that a job needs."""

    split: str
    field: str
    """The first source that needs the most rows: spec.data.train."""
    num_rows: int | None
    """From the first one on. None: all."""


def list_wanted(sources: Mapping[str, DataSource]) -> list[Wanted]:
    """Return what the sources need, by split. `sources`: env:// ones, by path."""
    found: dict[str, Wanted] = {}
    for field, source in sources.items():
        split = source.env_split
        assert split is not None
        num_rows = None if source.limit is None else source.offset + source.limit
        known = found.get(split)
        if known is None or (known.num_rows is not None and (num_rows is None or num_rows > known.num_rows)):
            found[split] = Wanted(split, field, num_rows)
    return list(found.values())


class RowReading:
    """Reads the rows of one split, and keeps them in the run's folder."""

    def __init__(self, run_dir: Path, wanted: Wanted, disk: RunDisk, *, is_resumed: bool) -> None:
        """Raise InputError if the record of a run that resumes is damaged."""
        self.wanted, self._run_dir, self._disk = wanted, run_dir, disk
        self._source = f"env://{wanted.split}"
        self._record = self._read_record() if is_resumed else None
        """What the run has begun with."""
        lines = read_lines(run_dir, wanted.split) if self._record else []
        is_intact = self._record is not None and digest_rows(lines) == self._record.digest
        self.lines = lines if is_intact else []
        """Those that are known, each with its end."""
        self._is_whole = is_intact and self._record is not None and self._record.is_whole

    def _read_record(self) -> RowsRecord | None:
        try:
            return read_record(self._run_dir, self.wanted.split)
        except ValueError as error:
            path = record_file(self._run_dir, self.wanted.split)
            raise self._fail(
                f"{path} is damaged, which says what rows the run began with; restore it, or start a new run"
            ) from error

    @property
    def is_complete(self) -> bool:
        wanted = self.wanted.num_rows
        return self._is_whole or (wanted is not None and len(self.lines) >= wanted)

    async def read(self, runner: RowsClient) -> None:
        """Read what is missing. Raise InputError if the environment has no usable rows, and TransientError."""
        num_bytes = sum(map(len, self.lines))
        while not self.is_complete:
            start, wanted = len(self.lines), self.wanted.num_rows
            page = await self._ask(runner, start, MAX_ROWS_OF_PAGE if wanted is None else wanted - start)
            self.lines += [_encode(row) for row in page.rows]
            self._is_whole = page.is_last
            num_bytes += sum(map(len, self.lines[start:]))
            self._check(runner, page, num_bytes)
        await self._disk.write(rows_file(self._run_dir, self.wanted.split), self._write)

    async def _ask(self, runner: RowsClient, start: int, count: int) -> RowsReply:
        try:
            return await runner.read(self.wanted.split, start, min(count, MAX_ROWS_OF_PAGE))
        except TransientError as error:
            raise TransientError(f"{self.wanted.field}.source: {self._source}: {error}") from error
        except UserError as error:
            raise self._fail(str(error)) from error

    def _check(self, runner: RowsClient, page: RowsReply, num_bytes: int) -> None:
        if not self.lines and page.is_last:
            raise self._fail(f"{runner.environment} has no rows in this split; name another split, or a file")
        if not page.rows and not page.is_last:
            raise self._fail(f"{runner.environment} returned no row after {len(self.lines)}, and did not end")
        if page.total is None and self.wanted.num_rows is None and len(self.lines) > MAX_UNKNOWN_ROWS:
            problem = f"{runner.environment} has more than {MAX_UNKNOWN_ROWS} rows, and perhaps no end"
            raise self._fail(f"{problem}; set {self.wanted.field}.limit to the number of rows to use")
        if num_bytes > _MAX_BYTES:
            raise self._fail(f"the first {len(self.lines)} rows have {num_bytes >> 30} GiB; set limit to use fewer")

    def _fail(self, problem: str) -> InputError:
        return InputError(f"{self.wanted.field}.source", f"{self._source}: {problem}")

    def _write(self) -> None:
        """Write the file, and then its record. May be repeated."""
        before = self._record
        if before is not None and digest_rows(self.lines[: before.num_rows]) != before.digest:
            path = rows_file(self._run_dir, self.wanted.split)
            raise self._fail(
                f"{path} is damaged, and the environment now returns other rows than those that the run began with; "
                "restore the file, or start a new run"
            )
        path = rows_file(self._run_dir, self.wanted.split)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}.partial")
        with temporary.open("wb") as file:
            file.writelines(self.lines)
        rename_durably(temporary, path)
        record = RowsRecord(num_rows=len(self.lines), is_whole=self._is_whole, digest=digest_rows(self.lines))
        write_durably(record_file(self._run_dir, self.wanted.split), record.model_dump_json(indent=1) + "\n")


def _encode(row: Mapping[str, object]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


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


log = logging.getLogger(__name__)

STARTING = "reads the data and starts Ray"
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Inputs:
    train: list[PromptSource]
    held_out: dict[str, list[Prompt]]
    """By the name of an evaluation set."""
    tokenizer: Any
    given: GivenRows | None = None
    """Those of the warm start."""


def load_inputs(environment: Environment, settings: ModelSettings) -> Inputs:
    """Return the training and the held-out prompts, without those that are too long for the rollouts."""
    spec, access = settings.job.spec, HubAccess.from_environment(os.environ)
    tokenizer = load_tokenizer(environment.model, spec.model)

    def load(source: DataSource, location: str, field: str, held_out: HeldOutSet | None = None) -> PromptSet:
        limit = find_limit(spec, held_out, settings.model_length, is_given=isinstance(source, GivenSource))
        split = source.env_split or ("test" if held_out else "train")
        prompts, table = load_prompts(
            spec.data, source, location, tokenizer, split=split, limit=limit, access=access, field=field
        )
        log.info("%s", describe_lengths(table))
        return prompts

    def load_source(each: NamedSource, location: str) -> PromptSource:
        prompts, source = load(each.source, location, each.path), each.source
        name = source.name if spec.data.tells_sources_apart else ""
        return PromptSource(source.name, source.weight, prompts.named(name))

    sources = spec.data.train_sources if spec.trains else []
    train = [load_source(*each) for each in zip(sources, environment.train_data, strict=spec.trains)]
    length = spec.rollout.max_model_len or settings.model_length
    given = build_given(spec, train.pop().prompts, tokenizer, length) if train and spec.data.warm_start else None
    sets, held_out_at = spec.held_out_sets, environment.held_out_data
    held_out = {s.name: list(load(s.data, held_out_at[s.name], s.data_path, s).by_row.values()) for s in sets}
    return Inputs(train, held_out, tokenizer, given)


class HubWait:
    """Waits while the Hub, or the object storage, does not answer, and says so in the status."""

    def __init__(self, outages: Outages, board: StatusBoard, sources: Iterable[str]) -> None:
        """`sources`: of the job's models and data."""
        what, remedy = name_storage(sources, HubAccess.from_environment(os.environ))
        self._what = "the Hub" if what.startswith("spec.hub") else "the object storage"
        self._health, self._board = outages.watch(what, remedy), board

    async def read(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of `work`, which reads models or data in a thread."""
        result = await wait_out(self._health, partial(asyncio.to_thread, work), partial(self._explain, TransientError))
        self._board.waits_for(STARTING)
        return result

    async def start_trainer(self, start: StartTrainer, **arguments: Any) -> Trainer:
        """Start a trainer group, whose ranks read the model."""
        return await wait_out(self._health, partial(start, **arguments), partial(self._explain, SourceAwayError))

    def _explain(self, kind: type[Exception], error: Exception) -> str:
        if not isinstance(error, kind):
            return ""
        self._board.waits_for(f"waits for {self._what}: {error}")
        return str(error)


async def read_inputs(
    environment: Environment, settings: ModelSettings, board: StatusBoard, disk: RunDisk, hub: HubWait
) -> Inputs:
    if settings.job.spec.env_sources:
        environment = await place_rows(environment, settings.job.spec, board, disk)
    return await hub.read(partial(load_inputs, environment, settings))
