"""The program of a training service: the head's Ray, ranks and rollouts, and in place of the driver Tinker's server.

    settings, environment --> Ray, ranks, rollouts --> the model without an adapter is published --> clients

Ranks that die are started again, within the trainer's backoff limit. With an error that only the user can fix, clients
get the reason for some seconds, and the program ends; with another one it ends at once, and the next program goes on
from the journal. Invariant: Ray's environment is set before the first import of Ray.
"""

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_api.read.pod_files import JobFile
from rljob_api.wire.contract import ENV_CLIENTS_ADDRESS, ENV_TOKEN, PORT_CLIENTS, ExitCode
from rljob_api.wire.driver_status import SERVING
from rljob_api.wire.logs import configure_logging
from rljob_api.wire.termination import end_program
from rljob_inputs.hub import name_model, repository_name
from rljob_inputs.memory.object_store import head_store_bytes
from rljob_inputs.models.architectures import text_config
from rljob_inputs.models.config import publishes_adapter
from rljob_inputs.models.own_settings import ModelSettings, load_model_settings
from rljob_trainer.concurrency import run_with_watcher
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.driver.rank_failures import RankFailureLog
from rljob_trainer.failures.configuration import explain_end
from rljob_trainer.head.environment import Environment, read_environment
from rljob_trainer.head.main import force_exit_after
from rljob_trainer.ranks.ray_node import ray_environment
from rljob_trainer.tinker.wire import ModelLimits

log = logging.getLogger(__name__)

_TELL_SECONDS = 15.0
"""For which clients get the reason of the end: longer than the first pauses between the SDK's tries."""
_END_SECONDS = 10.0
FOLDER = "tinker"
"""Folder of the clients' checkpoints, in the run's."""


@dataclass(frozen=True)
class Settings:
    """What the service reads of its job, and of the environment."""

    name: str
    """By which clients know the model."""
    host: str
    """Empty: all addresses."""
    port: int
    max_adapters: int
    keys: Callable[[], Mapping[str, str]]
    """Returns the keys of the clients, by their names, which may change."""


def read_settings(environment: Environment, variables: Mapping[str, str]) -> Settings:
    spec, token = environment.job.spec, variables[ENV_TOKEN]
    service = spec.service
    if service is None:
        raise UserError("spec.service is not set, without which there is nothing to serve")
    read_spec = JobFile(environment.job_file, spec).read_spec
    host, _, port = variables.get(ENV_CLIENTS_ADDRESS, f":{PORT_CLIENTS}").rpartition(":")
    return Settings(
        name=service.model_name or name_model(spec.model.source),
        host=host,
        port=int(port),
        max_adapters=service.max_adapters,
        keys=lambda: (read_spec().service or service).derive_keys(token),
    )


async def serve(environment: Environment, settings: Settings, on_ray: Callable[[], None]) -> None:
    """Serve until it is cancelled. `on_ray`: called once Ray is connected, since Ray replaces signal handlers."""
    from rljob_trainer.head.wiring import Head
    from rljob_trainer.ranks.group import TrainerGroup
    from rljob_trainer.replicas.http import open_session
    from rljob_trainer.replicas.rollout_client import RolloutClient
    from rljob_trainer.tinker.journal import Journal
    from rljob_trainer.tinker.sampling import Sampler
    from rljob_trainer.tinker.server import TinkerServer
    from rljob_trainer.tinker.service import Service

    environment.run_dir.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        head = Head(environment, stack)
        await head.answer()
        files = await head.open_run()
        model_settings = await head.hub.read(partial(load_model_settings, environment.job, head.environment.model))
        job, limits = model_settings.job, _read_limits(model_settings)
        watch_ray = await head.start_ray(head_store_bytes(job, limits.context))
        on_ray()
        session = await stack.enter_async_context(open_session())
        rollouts = RolloutClient(
            job.spec.rollout,
            session,
            reports=head.pulls,
            special_ids=model_settings.own.special_tokens,
            outages=head.outages,
            spans_updates=True,  # an update of the rollouts changes slots that no request uses
        )
        await rollouts.start()
        stack.push_async_callback(rollouts.close)
        root = environment.run_dir / FOLDER
        lora, model = job.spec.trainer.lora, environment.job.spec.model
        assert lora is not None, "a service has one"
        kind = f"{model.source} {model.revision} {lora.rank} {lora.target_modules}"
        journal = Journal(root / "journal.sqlite", kind)
        stack.callback(journal.close)
        service = Service(
            journal,
            name=settings.name,
            tokenizer=repository_name(head.environment.model),
            limits=limits,
            max_rank=lora.rank,
            max_adapters=settings.max_adapters,
            root=root,
            measure=head.prometheus.measure,
        )
        head.prometheus.register_service(service.count)
        server, failures = TinkerServer(service, settings.keys), RankFailureLog(job.spec.trainer)
        stack.push_async_callback(server.close)
        is_open = service.restore()

        async def open_server() -> None:
            log.info("serves %s at %s", settings.name, await server.start(settings.host, settings.port))
            head.board.set_phase(SERVING)
            stack.enter_context(head.board.live(service.describe))

        async def run_ranks() -> None:
            generation = secrets.token_hex(4)
            group = await TrainerGroup.start(
                job,
                model=head.environment.model,
                run=files.folder,
                generation=generation,
                checkpoint=None,
                report=head.board.waits_for,
                pace=head.pace,
                is_paused=head.outages.is_open,
            )
            try:
                sampler = Sampler(group, generation, rollouts, head.board, job.spec.num_adapter_slots)
                await run_with_watcher(work(group, sampler), group.watch())
            finally:
                await group.close()

        async def work(group: TrainerGroup, sampler: Sampler) -> None:
            nonlocal is_open
            await service.use(group, sampler)
            head.board.waits_for("waits for the rollouts")
            await sampler.start()
            head.board.waits_for("")
            if not is_open:
                await open_server()
            is_open = True
            await group.wait_until_ended()

        async def keep_ranks() -> None:
            while True:
                try:
                    await run_ranks()
                except TrainerGroupDiedError as error:
                    log.warning("%s; the ranks start again", error)
                    failures.record(error, time.monotonic())
                    failures.check(error, time.monotonic())

        try:
            if is_open:  # clients of an earlier program wait
                await open_server()
            await run_with_watcher(keep_ranks(), watch_ray())
        except RLJobError as error:
            if not isinstance(error, TransientError):  # else the program starts again, and its clients try again
                service.failure = f"the service has ended: {error}; start it again"
                await asyncio.sleep(_TELL_SECONDS)
            raise


def _read_limits(settings: ModelSettings) -> ModelLimits:
    config = text_config(settings.own.config)
    if not publishes_adapter(settings.job.spec, settings.own.config):
        raise UserError(f"spec.model: vLLM cannot load adapters of {config.get('model_type')} models")
    return ModelLimits(settings.context_length or config["max_position_embeddings"], config["vocab_size"])


async def _run(environment: Environment, settings: Settings) -> None:
    task = asyncio.current_task()
    assert task is not None

    def install_handlers() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)

    def stop() -> None:
        force_exit_after(_END_SECONDS, lambda: ExitCode.INFRASTRUCTURE)
        task.cancel()

    install_handlers()
    try:
        await serve(environment, settings, install_handlers)
    except asyncio.CancelledError:
        raise TransientError("stopped by a signal") from None


def main() -> int:
    configure_logging()
    os.environ.update(ray_environment())
    try:
        environment = read_environment(dict(os.environ))
        asyncio.run(_run(environment, read_settings(environment, os.environ)))
    except Exception as error:
        if not isinstance(error, RLJobError):
            log.exception("unexpected error")
        return end_program(*explain_end(error))
    return ExitCode.SUCCEEDED
