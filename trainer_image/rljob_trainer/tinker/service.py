"""What clients have in a service: sessions, models, samplers and checkpoints; and the rules of their requests.

    client (a key) --> sessions --> models, which the ranks hold by turns --> checkpoints, by name
                                '-> samplers, each of the weights that it was created for

Invariant: a command of a model runs while the ranks hold its adapter. A client reaches only what its own sessions have
made.
"""

import asyncio
import json
import logging
import math
import re
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tinker import types
from tinker.types.optimizer import AdamOptimizerConfig

from rljob_api.errors import UserError
from rljob_api.wire.driver_status import DriverStatus
from rljob_trainer.episodes.types import PromptTooLongError
from rljob_trainer.ranks.group import TrainerGroup
from rljob_trainer.tinker import slot, wire
from rljob_trainer.tinker.sampling import Sampler
from rljob_trainer.tinker.streams import Futures, Result, Stream, Turns, Work
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


class UnknownError(RefusedError):
    """A client names what does not exist, or is another client's."""


@dataclass
class Session:
    id: str
    client: str
    heard_at: float
    is_finished: bool = False

    def is_alive(self, now: float) -> bool:
        return not self.is_finished and now - self.heard_at < _AWAY_SECONDS


@dataclass
class Model:
    id: str
    session: Session
    rank: int
    stream: Stream
    unnamed: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class SamplerSession:
    id: str
    folder: Path | None
    """Folder of its adapter; None: the model without one."""
    model_path: str | None = None


class Service:
    def __init__(
        self,
        group: TrainerGroup,
        sampler: Sampler,
        *,
        name: str,
        tokenizer: str,
        limits: ModelLimits,
        max_rank: int,
        max_adapters: int,
        root: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: by which clients know the model. `tokenizer`: from where they load it. `root`: of checkpoints."""
        self._group, self._sampler, self._clock = group, sampler, clock
        self._name, self._tokenizer, self._limits, self._max_rank = name, tokenizer, limits, max_rank
        self._max_adapters, self._root = max_adapters, root
        self._sessions: dict[str, Session] = {}
        self._samplers: dict[str, SamplerSession] = {}
        self._models: dict[str, Model] = {}
        self._held = ""
        """The model whose adapter the ranks hold."""
        self._ended: dict[str, str] = {}
        """Why a model is no longer here, by its id."""
        self._turns = Turns()
        self.futures = Futures()
        self.failure = ""
        """Why all requests fail from now on; empty while the service runs."""

    def create_session(self, client: str, request: types.CreateSessionRequest) -> dict[str, Any]:
        self._end_sessions()
        session = Session(f"s{secrets.token_hex(8)}", client, self._clock())
        self._sessions[session.id] = session
        log.info("client %s: session %s", client, session.id)
        return {"type": "create_session", "session_id": session.id}

    def heartbeat(self, client: str, request: types.SessionHeartbeatRequest) -> dict[str, Any]:
        self._find_session(client, request.session_id)
        return {"type": "session_heartbeat"}

    def finish_session(self, client: str, session_id: str) -> dict[str, Any]:
        self._find_session(client, session_id).is_finished = True
        return {}

    def describe_server(self) -> dict[str, Any]:
        model = {"model_name": self._name, "max_context_length": self._limits.context}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    def describe(self, status: DriverStatus) -> DriverStatus:
        """Return the head's status with whom the service serves."""
        now, models = self._clock(), self._models.values()
        clients = {each.client for each in self._sessions.values() if each.is_alive(now)}
        num_busy = sum(each.stream.is_busy for each in models)
        counts = {"client": len(clients), "adapter": len(models)}.items()
        served = ", ".join([*(f"{count} {name}{'s' * (count != 1)}" for name, count in counts), f"{num_busy} busy"])
        return status.model_copy(update={"waits_for": status.waits_for or served})

    def create_model(self, client: str, request: types.CreateModelRequest) -> dict[str, Any]:
        lora, session = request.lora_config, self._find_session(client, request.session_id)
        self._check_base(request.base_model)
        _check_optimizer(request.optimizer_config)
        if lora is None:
            raise RefusedError("lora_config: is needed; this service trains adapters alone")
        if not lora.train_mlp or not lora.train_attn:
            raise RefusedError("lora_config: train_mlp and train_attn must be true; adapters are on all linear layers")
        rank, seed = lora.rank, secrets.randbits(31) if lora.seed is None else lora.seed
        self._check_rank(rank)
        if lora.train_unembed:
            log.info("train_unembed has no effect: adapters are on all linear layers but the output embedding")

        async def work(model: Model) -> Result:
            await self._group.call(slot.create, rank, seed)
            return {"type": "create_model", "model_id": model.id}

        return self._begin_model(session, request.model_seq_id, rank, work)

    def load_weights(self, client: str, request: types.LoadWeightsRequest) -> dict[str, Any]:
        """Into the client's model; or, by session_id, into a new one."""
        if request.weights_access_token is not None:
            raise RefusedError("weights_access_token is not supported; a client loads its own checkpoints")
        _check_optimizer(request.optimizer_config)
        self._check_base(request.base_model or self._name)

        async def work(model: Model) -> Result:
            folder, facts = self._find_checkpoint(client, request.path, "weights")
            await self._group.call(slot.load, folder, facts["rank"], request.optimizer)
            model.rank = facts["rank"]
            return {"type": "load_weights", "path": request.path, "model_id": model.id}

        if request.session_id is None:
            return self._begin(client, request.model_id, request.seq_id, work)
        session = self._find_session(client, request.session_id)
        _, facts = self._find_checkpoint(client, request.path, "weights")
        return self._begin_model(session, request.model_seq_id or 0, facts["rank"], work)

    def get_info(self, client: str, request: types.GetInfoRequest) -> dict[str, Any]:
        model = self._find_model(client, request.model_id)
        data = {"arch": None, "model_name": self._name, "tokenizer_id": self._tokenizer}
        facts = {"model_data": data, "model_id": model.id, "model_name": self._name}
        return {"type": "get_info", **facts, "is_lora": True, "lora_rank": model.rank}

    def forward_backward(self, client: str, body: bytes) -> dict[str, Any]:
        request = wire.parse_batch(body)

        async def work(model: Model) -> Result:
            batch = wire.read_batch(request, self._limits)
            model.stream.num_tokens += sum(len(row.token_ids) for row in batch.rows)
            arguments = (batch.loss, batch.settings, batch.backward)
            logprobs, sums = await self._group.call_with_rows(
                slot.forward_backward, batch.rows, batch.facts, *arguments
            )
            return wire.write_batch([each[1:] for each in logprobs], sum(sums))

        return self._begin(client, request.model_id, request.seq_id, work)

    def optim_step(self, client: str, request: types.OptimStepRequest) -> dict[str, Any]:
        async def work(model: Model) -> Result:
            [(norm, num_updates), *_] = await self._group.call(slot.update, wire.read_adam(request.optim_params))
            log.info("model %s: update %d, norm of the gradient %.3g", model.id, num_updates, norm)
            if not math.isfinite(norm):  # JSON has no such numbers
                raise RefusedError(f"the gradient's norm is {norm}: it was dropped, and the weights are as before")
            return {"metrics": {"grad_norm": norm, "num_updates": num_updates}}

        return self._begin(client, request.model_id, request.seq_id, work)

    def save_weights(self, client: str, request: types.SaveWeightsRequest) -> dict[str, Any]:
        async def work(model: Model) -> Result:
            path, folder = self._new_checkpoint(model, "weights", request.path, overwrite=request.overwrite)
            await self._group.save(folder)
            await self._group.saved()
            self._complete(folder, model)
            return {"type": "save_weights", "path": path}

        return self._begin(client, request.model_id, request.seq_id, work)

    def save_weights_for_sampler(self, client: str, request: types.SaveWeightsForSamplerRequest) -> dict[str, Any]:
        number = request.sampling_session_seq_id

        async def work(model: Model) -> Result:
            if request.kind != "snapshot":
                raise RefusedError(f"kind: {request.kind} is not supported; use snapshot")
            name = request.path if number is None else f"unnamed-{request.seq_id}"
            path, folder = self._new_checkpoint(model, "sampler_weights", name, overwrite=False)
            await self._group.call(slot.write_adapter, folder, model.rank)
            folder = self._complete(folder, model)
            if number is None:
                return {"type": "save_weights_for_sampler", "path": path}
            model.unnamed.append(folder)
            while len(model.unnamed) > _NUM_UNNAMED:
                await asyncio.to_thread(shutil.rmtree, model.unnamed.pop(0), ignore_errors=True)
            sampler = self._add_sampler(model.session, number, folder, path)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}

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

    def sample(self, client: str, request: types.SampleRequest) -> dict[str, Any]:
        if request.sampling_session_id is None or request.seq_id is None:
            raise RefusedError("sampling_session_id: is needed; create a SamplingClient")
        sampler = self._find_sampler(client, request.sampling_session_id)
        request_id = f"{sampler.id}:{request.seq_id}"

        async def work() -> Result:
            return await self._sampler.sample(sampler.folder, wire.read_sample(request, self._limits))

        self.futures.begin(request_id, work)
        ids = [f"{request_id}:{i}" for i in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def describe_weights(self, client: str, path: str) -> dict[str, Any]:
        facts = self._find_checkpoint(client, path)[1]
        return {"base_model": self._name, "is_lora": True, "lora_rank": facts["rank"]}

    async def retrieve(self, client: str, request_id: str, seconds: float) -> Result | None:
        """Return the result, or that it failed; None after `seconds`."""
        self._find_session(client, request_id.partition(":")[0])
        if request_id not in self.futures:
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

        async def work(_: Model) -> Result:
            raise error

        return self._begin(client, model_id, seq_id, work)

    def _begin(
        self, client: str, model_id: str | None, seq_id: int | None, work: Callable[[Model], Any]
    ) -> dict[str, Any]:
        """Begin a command of a model. What is wrong with it becomes its result, so that later ones run."""
        model = self._find_model(client, model_id)
        if seq_id is None:
            raise RefusedError("seq_id: is needed; use the tinker SDK 0.38")
        return self._run(model, seq_id, work)

    def _run(self, model: Model, seq_id: int, work: Callable[[Model], Any]) -> dict[str, Any]:
        async def hold_and_work() -> Result:
            try:
                if self._held != model.id:
                    await self._group.call(slot.hold, self._held, model.id, list(self._models))
                    self._held = model.id
                return await work(model)
            except BaseException as error:
                if seq_id == 0:  # the ranks may hold what another model has left
                    self._end(model, f"{model.id} could not be created: {error}")
                raise

        run: Work = partial(model.stream.run, seq_id, hold_and_work)
        self.futures.begin(f"{model.id}:{seq_id}", run)
        return {"request_id": f"{model.id}:{seq_id}", "model_id": model.id}

    def _begin_model(self, session: Session, number: int, rank: int, work: Callable[[Model], Any]) -> dict[str, Any]:
        """Begin a model, unless this is a retry."""
        model_id = f"{session.id}:train:{number}"
        if model_id in self._ended or model_id in self._models:
            return {"request_id": f"{model_id}:0", "model_id": model_id}
        self._make_room(session, model_id)
        self._models[model_id] = Model(model_id, session, rank, Stream(self._turns))
        return self._run(self._models[model_id], 0, work)

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
        for folder in model.unnamed:
            shutil.rmtree(folder, ignore_errors=True)
        self._models.pop(model.id, None)

    def _end_sessions(self) -> None:
        """Drop what sessions that ended have left, but for models, which wait until their room is needed."""
        kept = {model.session.id for model in self._models.values()}
        for session in [each for each in self._sessions.values() if not each.is_alive(self._clock())]:
            if session.id not in kept:
                del self._sessions[session.id]
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
        return self._samplers.setdefault(sampler.id, sampler)

    def _check_base(self, name: str) -> None:
        if name != self._name:
            raise RefusedError(f"base_model: {name} is not served here; this service has {self._name}")

    def _check_rank(self, rank: int) -> None:
        if not 1 <= rank <= self._max_rank:
            raise RefusedError(
                f"rank: must be from 1 to {self._max_rank}, got {rank}; `rljob serve --max-rank` sets the limit"
            )

    def _new_checkpoint(self, model: Model, kind: str, name: str | None, *, overwrite: bool) -> tuple[str, Path]:
        """Return the path of a checkpoint, and the folder in which it is written until it is complete."""
        if name is None or not _NAME.fullmatch(name):
            raise RefusedError(f"name: must be letters, digits, '.', '_' and '-', at most 128, got {name!r}")
        folder = self._folder(model.session.client, model.id, kind, name)
        if (folder / _FACTS).exists() and not overwrite:
            raise RefusedError(f"name: {name} exists; choose another name, or save_state(..., overwrite=True)")
        scratch = folder.with_name(f".{name}")  # no name of a client begins so
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.parent.mkdir(parents=True, exist_ok=True)
        return f"tinker://{model.id}/{kind}/{name}", scratch

    def _complete(self, scratch: Path, model: Model) -> Path:
        """Put a written checkpoint in the place of one with its name. Return its folder."""
        facts = {"rank": model.rank, "max_rank": self._max_rank, "base": self._name}
        (scratch / _FACTS).write_text(json.dumps(facts))
        folder = scratch.with_name(scratch.name.removeprefix("."))
        shutil.rmtree(folder, ignore_errors=True)
        return scratch.rename(folder)

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
