"""What clients have in a service: sessions, models, samplers and checkpoints; and the rules of their requests.

    client (a key) --> sessions --> models, which the ranks hold by turns --> checkpoints, by name
                                '-> samplers, each of the weights that it was created for

A model that the ranks do not have is made again, before its next command, from its snapshot and the commands since.
They lose all models when one of them dies, and a new program has the journal alone. Invariants: a command of a model
runs while the ranks hold its adapter, to which each command before was applied once. A client reaches only what its own
sessions have made.
"""

import asyncio
import contextlib
import json
import logging
import math
import random
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from tinker import types
from tinker.types.optimizer import AdamOptimizerConfig

from rljob_api.errors import UserError
from rljob_api.wire.driver_status import DriverStatus
from rljob_trainer.concurrency import run_with_watcher
from rljob_trainer.episodes.types import PromptTooLongError
from rljob_trainer.ranks.group import TrainerGroup
from rljob_trainer.tinker import slot, wire
from rljob_trainer.tinker.journal import Entry, Journal, Snapshot
from rljob_trainer.tinker.sampling import Sampler
from rljob_trainer.tinker.streams import Futures, Result, Running, Stream, Turns, Work
from rljob_trainer.tinker.wire import ModelLimits, RefusedError

log = logging.getLogger(__name__)

_AWAY_SECONDS = 120.0
"""Without a heartbeat, which the SDK sends every 10 s, a session has ended."""
_NUM_UNNAMED = 8
"""Weights of samplers without a name that are kept for a model."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FACTS = "tinker.json"
"""In the folder of a checkpoint, once it is complete."""
_KINDS = {"weights": "save_state", "sampler_weights": "save_weights_for_sampler"}
_UNNAMED = "unnamed-"
"""Names that the service gives to weights begin so."""
_SNAPSHOTS = ".snapshots"
"""Folder of the models' snapshots, beside those of clients."""
_REPLAY_SECONDS = 60.0
"""A model gets a snapshot once the commands since its last one have taken so long."""
_NUM_TRIES = 3
"""Tries to run a command. One whose ranks die each time is taken to be the reason."""
_PAUSE_SECONDS = 5.0
"""Between tries to write the result of a command."""
_REQUESTS: dict[str, type[BaseModel]] = {
    "create_session": types.CreateSessionRequest,
    "session_heartbeat": types.SessionHeartbeatRequest,
    "create_model": types.CreateModelRequest,
    "get_info": types.GetInfoRequest,
    "optim_step": types.OptimStepRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "load_weights": types.LoadWeightsRequest,
    "create_sampling_session": types.CreateSamplingSessionRequest,
    "asample": types.SampleRequest,
}
"""By path, which is the name of a method here."""
NOT_SUPPORTED = "is not supported by this service; see docs/training-service.md"


class UnknownError(RefusedError):
    """A client names what does not exist, or is another client's."""


class GoneError(RefusedError):
    """The result of a sample is gone, which can be asked for again."""


@dataclass
class Session:
    id: str
    client: str
    heard_at: float
    is_finished: bool = False

    def is_alive(self, now: float) -> bool:
        return not self.is_finished and now - self.heard_at < _AWAY_SECONDS


Command = Callable[["Model", TrainerGroup], Coroutine[Any, Any, Result]]
"""What a request does with a model."""


@dataclass
class Model:
    id: str
    session: Session
    rank: int
    stream: Stream
    snapshot: Path | None = None
    """Its folder."""
    redo: dict[int, Command] = field(default_factory=dict)
    """The commands since the snapshot that changed the model, by number."""
    seconds: float = 0.0
    """What they have taken."""
    has_gradient: bool = False
    """It is in no snapshot."""
    group: TrainerGroup | None = None
    """The ranks that have the model."""


@dataclass(frozen=True)
class SamplerSession:
    id: str
    folder: Path | None
    """Folder of its adapter; None: the model without one."""
    model_path: str | None = None


class Service:
    def __init__(
        self,
        journal: Journal,
        *,
        name: str,
        tokenizer: str,
        limits: ModelLimits,
        max_rank: int,
        max_adapters: int,
        root: Path,
        clock: Callable[[], float] = time.monotonic,
        measure: Callable[[str, str, Running], Running] = lambda client, path, running: running,
    ) -> None:
        """`name`: by which clients know the model. `tokenizer`: from where they load it. `root`: of checkpoints.
        `measure`: gets the client and the path of what runs from now on."""
        self._journal, self._clock, self._measure = journal, clock, measure
        self._name, self._tokenizer, self._limits, self._max_rank = name, tokenizer, limits, max_rank
        self._max_adapters, self._root = max_adapters, root
        self._sessions: dict[str, Session] = {}
        self._samplers: dict[str, SamplerSession] = {}
        self._models: dict[str, Model] = {}
        self._ranks: tuple[TrainerGroup, Sampler] | None = None
        self._changed = asyncio.Condition()
        """Other ranks have come."""
        self._held: tuple[TrainerGroup | None, str] = (None, "")
        """The model whose adapter the ranks hold."""
        self._request: tuple[str, str, bytes] | None = None
        """Client, path and body of the one that is being accepted."""
        self._known: dict[str, Result | None] = {}
        """The result, by its id, of the request that is read from the journal; None: it has none yet."""
        self._ended: dict[str, str] = {}
        """Why a model is no longer here, by its id."""
        self._turns = Turns()
        self.futures = Futures()
        self.failure = ""
        """Why all requests fail from now on; empty while the service runs."""

    async def use(self, group: TrainerGroup, sampler: Sampler) -> None:
        """From now on, work with these ranks."""
        async with self._changed:
            self._ranks = group, sampler
            self._changed.notify_all()

    def restore(self) -> bool:
        """Go on with what the journal has. Return whether it has something."""
        snapshots = self._journal.read_snapshots()
        for each in self._journal.read():
            try:
                self._restore(each, snapshots.get(each.owner))
            except RefusedError as error:
                log.warning("client %s: %s of %s is not restored: %s", each.client, each.path, each.owner, error)
                if each.number == 0:
                    self._journal.drop(each.owner)
        kept = {self._snapshots(each) for each in self._models.values()}
        for folder in self._root.glob(f"{_SNAPSHOTS}/*"):
            if folder not in kept:  # of a model that ended while it was written, or of another journal
                shutil.rmtree(folder)
        return bool(self._sessions)

    def _restore(self, entry: Entry, snapshot: Snapshot | None) -> None:
        session_id = entry.owner.partition(":")[0]
        if entry.path == "create_session":
            is_finished = entry.result is not None
            self._sessions[session_id] = Session(session_id, entry.client, self._clock(), is_finished)
        elif entry.result is None or entry.body:
            self._known = {f"{entry.owner}:{entry.number}": entry.result}
            self._dispatch(entry.client, entry.path, entry.body)
        else:
            if entry.number == 0 and snapshot is not None:
                model = Model(entry.owner, self._sessions[session_id], snapshot.rank, Stream(self._turns))
                model.snapshot = self._snapshots(model) / snapshot.name
                self._models[model.id] = model
            self._recall(self._find_model(entry.client, entry.owner), entry.number, entry.result)

    def accept(self, client: str, path: str, body: bytes) -> dict[str, Any]:
        """Return the answer of a request, once the journal has it."""
        self._request = client, path, body
        try:
            return self._dispatch(client, path, body)
        finally:
            self._request = None

    def _keep(self, owner: str, number: int = 0) -> None:
        """Add the request of now to the journal, unless it comes from there."""
        if self._request is not None:
            self._journal.add(owner, number, *self._request)

    def _start(self, request_id: str, work: Work) -> None:
        """Begin the work of a request, unless it was begun before."""
        request = self._request  # None: it comes from the journal
        self.futures.begin(request_id, work if request is None else lambda: self._measure(*request[:2], work()))

    def _dispatch(self, client: str, path: str, body: bytes) -> dict[str, Any]:
        if path == "forward_backward":
            return self.forward_backward(client, body)
        given = json.loads(body)
        try:
            if path not in _REQUESTS:
                raise RefusedError(f"POST /api/v1/{path} {NOT_SUPPORTED}")
            answer: dict[str, Any] = getattr(self, path)(client, wire.parse(_REQUESTS[path], given))
        except RefusedError as error:
            return self.refuse(client, given, error)
        return answer

    def create_session(self, client: str, request: types.CreateSessionRequest) -> dict[str, Any]:
        self._end_sessions()
        session = Session(f"s{secrets.token_hex(8)}", client, self._clock())
        self._keep(session.id)
        self._sessions[session.id] = session
        log.info("client %s: session %s", client, session.id)
        return {"type": "create_session", "session_id": session.id}

    def session_heartbeat(self, client: str, request: types.SessionHeartbeatRequest) -> dict[str, Any]:
        self._find_session(client, request.session_id)
        return {"type": "session_heartbeat"}

    def finish_session(self, client: str, session_id: str) -> dict[str, Any]:
        self._find_session(client, session_id).is_finished = True
        self._journal.finish(session_id, 0, {}, changes=True)
        return {}

    def describe_server(self) -> dict[str, Any]:
        model = {"model_name": self._name, "max_context_length": self._limits.context}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    def describe(self, status: DriverStatus) -> DriverStatus:
        """Return the head's status with whom the service serves."""
        num_busy = sum(each.stream.is_busy for each in self._models.values())
        counts = self.count().items()
        served = ", ".join([*(f"{n} {name.removesuffix('s' * (n == 1))}" for name, n in counts), f"{num_busy} busy"])
        return status.model_copy(update={"waits_for": status.waits_for or served})

    def count(self) -> dict[str, int]:
        """Return the numbers of what there is now, by its name."""
        now = self._clock()
        clients = {each.client for each in self._sessions.values() if each.is_alive(now)}
        return {"clients": len(clients), "adapters": len(self._models)}

    def create_model(self, client: str, request: types.CreateModelRequest) -> dict[str, Any]:
        lora, session = request.lora_config, self._find_session(client, request.session_id)
        self._check_base(request.base_model)
        _check_optimizer(request.optimizer_config)
        if lora is None:
            raise RefusedError("lora_config: is needed; this service trains adapters alone")
        if not lora.train_mlp or not lora.train_attn:
            raise RefusedError("lora_config: train_mlp and train_attn must be true; adapters are on all linear layers")
        rank, seed = lora.rank, lora.seed
        self._check_rank(rank)
        if seed is not None and not 0 <= seed < 2**63:
            raise RefusedError(f"lora_config.seed: must be from 0 to 2^63 - 1, got {seed}")
        if lora.train_unembed:
            log.info("train_unembed has no effect: adapters are on all linear layers but the output embedding")

        async def work(model: Model, group: TrainerGroup) -> Result:
            # The same each time.
            await group.call(slot.create, rank, random.Random(model.id).getrandbits(31) if seed is None else seed)
            return {"type": "create_model", "model_id": model.id}

        return self._begin_model(session, request.model_seq_id, rank, work, changes=True)

    def load_weights(self, client: str, request: types.LoadWeightsRequest) -> dict[str, Any]:
        """Into the client's model; or, by session_id, into a new one."""
        if request.weights_access_token is not None:
            raise RefusedError("weights_access_token is not supported; a client loads its own checkpoints")
        _check_optimizer(request.optimizer_config)
        self._check_base(request.base_model or self._name)

        async def work(model: Model, group: TrainerGroup) -> Result:
            folder, facts = self._find_checkpoint(client, request.path, "weights")
            model.group = None  # unless all of this succeeds
            await group.call(slot.load, folder, facts["rank"], request.optimizer)
            # The client may write other weights to the path. This command has no result yet.
            await self._save_snapshot(model, group, (request.seq_id or 0) - 1, facts["rank"])
            model.group, model.has_gradient = group, False
            return {"type": "load_weights", "path": request.path, "model_id": model.id}

        if request.session_id is None:
            return self._begin(client, request.model_id, request.seq_id, work)
        session = self._find_session(client, request.session_id)
        _, facts = self._find_checkpoint(client, request.path, "weights")
        return self._begin_model(session, request.model_seq_id or 0, facts["rank"], work, changes=False)

    def get_info(self, client: str, request: types.GetInfoRequest) -> dict[str, Any]:
        model = self._find_model(client, request.model_id)
        data = {"arch": None, "model_name": self._name, "tokenizer_id": self._tokenizer}
        facts = {"model_data": data, "model_id": model.id, "model_name": self._name}
        return {"type": "get_info", **facts, "is_lora": True, "lora_rank": model.rank}

    def forward_backward(self, client: str, body: bytes) -> dict[str, Any]:
        request = wire.parse_batch(body)

        async def work(model: Model, group: TrainerGroup) -> Result:
            try:
                batch = wire.read_batch(request, self._limits)
            except ValueError as error:
                raise RefusedError(str(error)) from error
            model.has_gradient |= batch.backward
            model.stream.num_tokens += sum(len(row.token_ids) for row in batch.rows)
            arguments = (batch.loss, batch.settings, batch.backward)
            logprobs, sums = await group.call_with_rows(slot.forward_backward, batch.rows, batch.facts, *arguments)
            return wire.write_batch([each[1:] for each in logprobs], sum(sums))

        return self._begin(client, request.model_id, request.seq_id, work, changes=not request.forward_only)

    def optim_step(self, client: str, request: types.OptimStepRequest) -> dict[str, Any]:
        async def work(model: Model, group: TrainerGroup) -> Result:
            [(norm, num_updates), *_] = await group.call(slot.update, wire.read_adam(request.optim_params))
            model.has_gradient = False
            log.info("model %s: update %d, norm of the gradient %.3g", model.id, num_updates, norm)
            if not math.isfinite(norm):  # JSON has no such numbers
                raise RefusedError(f"the gradient's norm is {norm}: it was dropped, and the weights are as before")
            return {"metrics": {"grad_norm": norm, "num_updates": num_updates}}

        return self._begin(client, request.model_id, request.seq_id, work, changes=True)

    def save_weights(self, client: str, request: types.SaveWeightsRequest) -> dict[str, Any]:
        async def work(model: Model, group: TrainerGroup) -> Result:
            number, overwrite = request.seq_id or 0, request.overwrite
            path, folder = self._new_checkpoint(model, number, "weights", request.path, overwrite=overwrite)
            await group.save(folder)
            await group.saved()
            self._complete(folder, model, number)
            return {"type": "save_weights", "path": path}

        return self._begin(client, request.model_id, request.seq_id, work)

    def save_weights_for_sampler(self, client: str, request: types.SaveWeightsForSamplerRequest) -> dict[str, Any]:
        sampler, number = request.sampling_session_seq_id, request.seq_id or 0

        async def work(model: Model, group: TrainerGroup) -> Result:
            if request.kind != "snapshot":
                raise RefusedError(f"kind: {request.kind} is not supported; use snapshot")
            name = request.path if sampler is None else f"{_UNNAMED}{number}"
            if sampler is None and name and name.startswith(_UNNAMED):
                raise RefusedError(f"name: {_UNNAMED} is what weights without a name begin with; choose another")
            path, folder = self._new_checkpoint(model, number, "sampler_weights", name, overwrite=False)
            await group.call(slot.write_adapter, folder, model.rank)
            self._complete(folder, model, number)
            if sampler is None:
                return {"type": "save_weights_for_sampler", "path": path}
            for each in self._list_unnamed(model)[:-_NUM_UNNAMED]:
                await asyncio.to_thread(shutil.rmtree, each, ignore_errors=True)
            body = {"session_id": model.session.id, "sampling_session_seq_id": sampler, "model_path": path}
            made = self.accept(client, "create_sampling_session", json.dumps(body).encode())
            return made | {"type": "save_weights_for_sampler"}

        return self._begin(client, request.model_id, request.seq_id, work)

    def create_sampling_session(self, client: str, request: types.CreateSamplingSessionRequest) -> dict[str, Any]:
        session, folder = self._find_session(client, request.session_id), None
        if request.model_path is not None:
            folder, _ = self._find_checkpoint(client, request.model_path, "sampler_weights")
        else:
            self._check_base(request.base_model or "")
        sampler = self._add_sampler(session, request.sampling_session_seq_id, folder, request.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def get_sampler(self, client: str, sampler_id: str) -> dict[str, Any]:
        sampler = self._find_sampler(client, sampler_id)
        return {"sampler_id": sampler.id, "base_model": self._name, "model_path": sampler.model_path}

    def asample(self, client: str, request: types.SampleRequest) -> dict[str, Any]:
        if request.sampling_session_id is None or request.seq_id is None:
            raise RefusedError("sampling_session_id: is needed; create a SamplingClient")
        sampler = self._find_sampler(client, request.sampling_session_id)
        request_id = f"{sampler.id}:{request.seq_id}"

        asked = wire.read_sample(request, self._limits)

        async def work(group: TrainerGroup, ranks: Sampler) -> Result:
            return await run_with_watcher(ranks.sample(sampler.folder, asked), group.wait_until_ended(0.0))

        self._start(request_id, partial(self._try, work, math.inf))
        ids = [f"{request_id}:{i}" for i in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def describe_weights(self, client: str, path: str) -> dict[str, Any]:
        facts = self._find_checkpoint(client, path)[1]
        return {"base_model": self._name, "is_lora": True, "lora_rank": facts["rank"]}

    async def retrieve(self, client: str, request_id: str, seconds: float) -> Result | None:
        """Return the result, or that it failed; None after `seconds`."""
        self._find_session(client, request_id.partition(":")[0])
        if request_id not in self.futures:
            if ":sample:" in request_id:
                raise GoneError(f"request_id: the sample {request_id} is gone; ask for it again")
            raise UnknownError(f"request_id: {request_id} is not known, or its result was taken long ago")
        try:
            return await self.futures.wait(request_id, seconds)
        except Exception as error:
            return describe_error(error)

    def refuse(self, client: str, body: Any, error: RefusedError) -> dict[str, Any]:
        """Make the error the result of the command that `body` is: others wait for its number. Raise it for what is
        none."""
        model_id, seq_id = (body.get("model_id"), body.get("seq_id")) if isinstance(body, dict) else (None, None)
        if str(model_id) not in self._models or not isinstance(seq_id, int):
            raise error

        async def work(_: Model, __: TrainerGroup) -> Result:
            raise error

        return self._begin(client, model_id, seq_id, work)

    def _begin(
        self, client: str, model_id: str | None, seq_id: int | None, work: Command, *, changes: bool = False
    ) -> dict[str, Any]:
        """Begin a command of a model. What is wrong with it becomes its result, so that later ones run. `changes`:
        whether the model's state comes from it, and from no snapshot yet."""
        model = self._find_model(client, model_id)
        if not seq_id:
            raise RefusedError("seq_id: is needed, from 1 on; use the tinker SDK 0.38")
        return self._run(model, seq_id, work, changes=changes)

    def _run(self, model: Model, number: int, work: Command, *, changes: bool) -> dict[str, Any]:
        request_id = f"{model.id}:{number}"
        if (result := self._known.pop(request_id, None)) is not None:
            self._recall(model, number, result, work)
        elif request_id not in self.futures:
            model.stream.check(number)
            self._keep(model.id, number)
            run: Work = partial(model.stream.run, number, partial(self._work, model, number, work, changes))
            self._start(request_id, run)
        return {"request_id": request_id, "model_id": model.id}

    def _recall(self, model: Model, number: int, result: Result, work: Command | None = None) -> None:
        """Take a command that an earlier program ran. `work`: what it was, unless it is in the snapshot."""
        self.futures.put(f"{model.id}:{number}", result)
        model.stream.finish(number)
        if work is not None:
            model.redo[number] = work

    async def _work(self, model: Model, number: int, work: Command, changes: bool) -> Result:
        """Run a command in its turn."""

        async def hold_and_work(group: TrainerGroup, _: Sampler) -> Result:
            await self._hold(model, group)
            return await work(model, group)

        started = self._clock()
        try:
            result = await self._try(hold_and_work, _NUM_TRIES)
        except Exception as error:
            if number == 0:  # the ranks may hold what another model has left
                self._end(model, f"{model.id} could not be created: {error}")
            result = describe_error(error)
            if not isinstance(error, RefusedError):
                model.group, changes = None, False  # what it did is undone
        if changes:
            model.redo[number] = work
            model.seconds += self._clock() - started
        await self._finish(model, number, result, changes)
        is_due = model.seconds >= _REPLAY_SECONDS and not model.has_gradient
        if is_due and model.group is not None and model.id in self._models:
            try:
                await self._save_snapshot(model, model.group, number, model.rank)
            except Exception:
                log.exception("model %s has no new snapshot; the next command tries again", model.id)
        return result

    async def _finish(self, model: Model, number: int, result: Result, changes: bool) -> None:
        """Write the result to the journal, however long its disk is full."""
        while True:
            try:
                return self._journal.finish(model.id, number, result, changes=changes)
            except sqlite3.OperationalError as error:
                log.error("the journal cannot be written: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _try(
        self, work: Callable[[TrainerGroup, Sampler], Coroutine[Any, Any, Result]], num_tries: float
    ) -> Result:
        """Do the work once there are ranks; again with the next ones if they die meanwhile."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._ranks is not None and not self._ranks[0].has_ended)
            assert self._ranks is not None, "it was waited for"
            group, sampler = self._ranks
            try:
                return await work(group, sampler)
            except Exception as error:
                num_tries -= 1
                if not group.has_ended or num_tries < 1:
                    raise
                log.warning("%s; what they did begins again with new ranks", error)

    async def _hold(self, model: Model, group: TrainerGroup) -> None:
        """Let the ranks hold the model."""
        if self._held != (group, model.id):
            before = self._held[1] if self._held[0] is group else ""
            await group.call(slot.hold, before, model.id, list(self._models))
            self._held = group, model.id
        if model.group is group:
            return
        if model.snapshot is not None:
            await group.call(slot.load, model.snapshot, model.rank, True)
        for number in sorted(model.redo):
            with contextlib.suppress(RefusedError):  # as the first time
                await model.redo[number](model, group)
        model.group = group

    async def _save_snapshot(self, model: Model, group: TrainerGroup, number: int, rank: int) -> None:
        """Keep the model as it is now, and nothing of what was before. `number`: of its last command."""
        name = secrets.token_hex(4)
        folder = self._snapshots(model) / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        await group.save(folder)
        await group.saved()
        if model.id not in self._models:  # it ended meanwhile
            return shutil.rmtree(folder.parent, ignore_errors=True)
        self._journal.cut(model.id, number, Snapshot(rank, name))
        model.snapshot, model.rank, model.seconds = folder, rank, 0.0
        model.redo.clear()
        for each in folder.parent.iterdir():
            if each != folder:
                await asyncio.to_thread(shutil.rmtree, each, ignore_errors=True)

    def _snapshots(self, model: Model) -> Path:
        return self._root / _SNAPSHOTS / model.id.replace(":", "-")

    def _begin_model(self, session: Session, number: int, rank: int, work: Command, *, changes: bool) -> dict[str, Any]:
        """Begin a model, unless this is a retry."""
        model_id = f"{session.id}:train:{number}"
        if model_id in self._ended or model_id in self._models:
            return {"request_id": f"{model_id}:0", "model_id": model_id}
        self._make_room(session, model_id)
        model = Model(model_id, session, rank, Stream(self._turns))
        answer = self._run(model, 0, work, changes=changes)
        self._models[model_id] = model
        return answer

    def _make_room(self, session: Session, successor: str) -> None:
        """End a model that has no client any more, or is the session's own and idle, if there are as many as may be."""
        if len(self._models) < self._max_adapters:
            return
        now = self._clock()
        alone = [each for each in self._models.values() if not each.session.is_alive(now)]
        own = [each for each in self._models.values() if each.session is session and not each.stream.is_busy]
        found = alone or own
        limit = f"the service holds {self._max_adapters} adapters (`rljob serve --max-adapters`)"
        if not found:
            raise RefusedError(
                f"{limit}, and all are in use; one is free once its session is closed, or has sent no heartbeat for "
                f"{_AWAY_SECONDS:.0f} s"
            )
        reason = f"{found[0].id} was replaced by {successor}: {limit}; load what save_state kept"
        self._end(found[0], reason)

    def _end(self, model: Model, reason: str) -> None:
        log.info("%s", reason)
        self._ended[model.id] = reason
        model.stream.end(reason)
        for folder in (*self._list_unnamed(model), self._snapshots(model)):
            shutil.rmtree(folder, ignore_errors=True)
        self._models.pop(model.id, None)
        self._journal.drop(model.id)

    def _end_sessions(self) -> None:
        """Drop what sessions that ended have left, but for models, which wait until their room is needed."""
        kept = {model.session.id for model in self._models.values()}
        for session in [each for each in self._sessions.values() if not each.is_alive(self._clock())]:
            if session.id not in kept:
                del self._sessions[session.id]
                self._journal.drop(session.id)
                self.futures.forget(session.id)
                self._samplers = {k: v for k, v in self._samplers.items() if not k.startswith(f"{session.id}:")}

    def _find_session(self, client: str, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None or session.client != client:
            raise UnknownError(f"session {session_id} is not known: the service was started again, or it has ended")
        session.heard_at = self._clock()
        return session

    def _find_model(self, client: str, model_id: str | None) -> Model:
        self._find_session(client, (model_id or "").partition(":")[0])
        if (model := self._models.get(model_id or "")) is None:
            raise UnknownError(self._ended.get(model_id or "", f"model {model_id} is not known; create it again"))
        return model

    def _find_sampler(self, client: str, sampler_id: str) -> SamplerSession:
        self._find_session(client, sampler_id.partition(":")[0])
        if (found := self._samplers.get(sampler_id)) is None:
            raise UnknownError(f"sampler {sampler_id} is not known; create it again")
        return found

    def _add_sampler(self, session: Session, number: int, folder: Path | None, path: str | None) -> SamplerSession:
        sampler = SamplerSession(f"{session.id}:sample:{number}", folder, path)
        self._keep(sampler.id)
        return self._samplers.setdefault(sampler.id, sampler)

    def _check_base(self, name: str) -> None:
        if name != self._name:
            raise RefusedError(f"base_model: {name} is not served here; this service has {self._name}")

    def _check_rank(self, rank: int) -> None:
        if not 1 <= rank <= self._max_rank:
            raise RefusedError(
                f"rank: must be from 1 to {self._max_rank}, got {rank}; `rljob serve --max-rank` sets the limit"
            )

    def _list_unnamed(self, model: Model) -> list[Path]:
        """Return the folders of weights without a name, the oldest first."""
        found = self._folder(model.session.client, model.id, "sampler_weights", "").glob(f"{_UNNAMED}*")
        return sorted(found, key=lambda folder: int(folder.name.removeprefix(_UNNAMED)))

    def _new_checkpoint(
        self, model: Model, number: int, kind: str, name: str | None, *, overwrite: bool
    ) -> tuple[str, Path]:
        """Return the path of a checkpoint, and the folder in which it is written until it is complete. `number`: of the
        command, which may have written it before."""
        if name is None or not _NAME.fullmatch(name):
            raise RefusedError(f"name: must be letters, digits, '.', '_' and '-', at most 128, got {name!r}")
        folder = self._folder(model.session.client, model.id, kind, name)
        facts = folder / _FACTS
        if not overwrite and facts.exists() and json.loads(facts.read_text()).get("command") != number:
            raise RefusedError(f"name: {name} exists; choose another name, or save_state(..., overwrite=True)")
        scratch = folder.with_name(f".{name}")  # no name of a client begins so
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.parent.mkdir(parents=True, exist_ok=True)
        return f"tinker://{model.id}/{kind}/{name}", scratch

    def _complete(self, scratch: Path, model: Model, number: int) -> None:
        """Put a written checkpoint in the place of one with its name."""
        facts = {"rank": model.rank, "max_rank": self._max_rank, "base": self._name, "command": number}
        (scratch / _FACTS).write_text(json.dumps(facts))
        folder = scratch.with_name(scratch.name.removeprefix("."))
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)

    def _find_checkpoint(self, client: str, path: str, kind: str = "") -> tuple[Path, dict[str, Any]]:
        """Return the folder of a checkpoint of the client, and its facts."""
        model_id, _, rest = path.removeprefix("tinker://").partition("/")
        found, _, name = rest.partition("/")
        if not path.startswith("tinker://") or found not in _KINDS or not _NAME.fullmatch(name):
            raise RefusedError(f"path: must be tinker://MODEL/weights/NAME or .../sampler_weights/NAME, got {path}")
        if kind and kind != found:
            raise RefusedError(f"path: {path} is of {_KINDS[found]}; this needs one of {_KINDS[kind]}")
        folder = self._folder(client, model_id, found, name)
        try:
            facts: dict[str, Any] = json.loads((folder / _FACTS).read_text())
        except OSError:
            raise UnknownError(f"path: {path} does not exist, or is another client's") from None
        self._check_base(facts["base"])
        self._check_rank(facts["rank"])
        if found == "weights" and facts["max_rank"] != self._max_rank:
            raise RefusedError(f"path: {path} was saved by a service with --max-rank {facts['max_rank']}; start it so")
        return folder, facts

    def _folder(self, client: str, model_id: str, kind: str, name: str) -> Path:
        if not re.fullmatch(r"[\w:-]+", model_id):
            raise RefusedError(f"path: {model_id} is not the id of a model")
        return self._root / client / model_id.replace(":", "-") / kind / name


def _check_optimizer(config: Any) -> None:
    if config is not None and not isinstance(config, AdamOptimizerConfig):
        raise RefusedError(f"optimizer_config: {config.type} is not supported; use adamw")


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return the result of a command that failed, in the SDK's categories."""
    if isinstance(error, BaseExceptionGroup):
        return describe_error(error.exceptions[0])
    if isinstance(error, RefusedError | UserError | PromptTooLongError):
        return {"error": str(error), "category": "user"}
    log.error("a command failed", exc_info=error)
    return {"error": f"{error}; see the service's log", "category": "server"}
