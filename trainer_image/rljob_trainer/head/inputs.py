"""What the head reads before it trains: tokenizer and prompts, also while the Hub or the object storage is away.

Errors that only the user can fix are raised; a source that does not answer is waited for, and the status says so.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rljob_api.errors import TransientError
from rljob_api.manifest.evaluation import HeldOutSet
from rljob_api.manifest.job_sections import DataSource, NamedSource
from rljob_inputs.data.lengths import find_limit
from rljob_inputs.data.prompts import PromptSet, load_prompts
from rljob_inputs.findings import describe_lengths
from rljob_inputs.hub.repository import HubAccess
from rljob_inputs.models.own_settings import ModelSettings
from rljob_inputs.prompts import Prompt
from rljob_trainer.driver.ports import StartTrainer, Trainer
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.failures.configuration import SourceAwayError
from rljob_trainer.feed.prompt_feed import PromptSource
from rljob_trainer.head.environment import Environment
from rljob_trainer.head.rows import place_rows
from rljob_trainer.head.tokenizer import load_tokenizer
from rljob_trainer.history.disk import RunDisk
from rljob_trainer.outages.registry import Outages, name_storage
from rljob_trainer.outages.waiting import wait_out

log = logging.getLogger(__name__)

STARTING = "reads the data and starts Ray"
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Inputs:
    train: list[PromptSource]
    held_out: dict[str, list[Prompt]]
    """By the name of an evaluation set."""
    tokenizer: Any


def load_inputs(environment: Environment, settings: ModelSettings) -> Inputs:
    """Return the training and the held-out prompts, without those that are too long for the rollouts."""
    spec, access = settings.job.spec, HubAccess.from_environment(os.environ)
    tokenizer = load_tokenizer(environment.model, spec.model)

    def load(source: DataSource, location: str, field: str, held_out: HeldOutSet | None = None) -> PromptSet:
        limit = find_limit(spec, held_out, settings.model_length)
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
    sets, held_out_at = spec.held_out_sets, environment.held_out_data
    held_out = {s.name: list(load(s.data, held_out_at[s.name], s.data_path, s).by_row.values()) for s in sets}
    return Inputs(train, held_out, tokenizer)


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
