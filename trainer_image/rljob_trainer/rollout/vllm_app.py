"""vLLM's OpenAI server, as its own program builds it, with a place for RLJob's middleware and a task next to it.

Owns the order in which vLLM's parts start and end. Invariants: nothing of vLLM responds before the middleware; the
end of an engine after a signal is quiet, and one without a signal is logged and is a failure: vLLM's server returns
alike after both.
"""

import asyncio
import logging
import os
import signal
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import psutil

from rljob_api.errors import TransientError
from rljob_trainer.concurrency import end_tasks

_ENGINE_LOG = "vllm.v1.engine.async_llm"


class _EndIsWanted(logging.Filter):
    """Drops errors of a dead engine."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return type(error).__name__ != "EngineDeadError"


def end_is_wanted() -> bool:
    """Whether the engine was terminated."""
    return any(isinstance(each, _EndIsWanted) for each in logging.getLogger(_ENGINE_LOG).filters)


def quiet_shutdown(shutdown: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap AsyncLLM.shutdown. It ends the engine before the task that reads from it, which then takes it for dead."""

    def wanted(timeout: float | None = None) -> Any:
        if not end_is_wanted():
            logging.getLogger(_ENGINE_LOG).addFilter(_EndIsWanted())
        return shutdown(timeout=timeout)

    return wanted


logger = logging.getLogger(__name__)

_IDLE_SECONDS = 120
"""Longer than the driver keeps an idle connection (`replicas.http`): with uvicorn's 5 s, the first requests after an
update met closed ones, and each failed its replica."""
_ANSWER_SECONDS = 5
"""Time to send the last responses after SIGTERM and the engine's end. Aborted requests are retried elsewhere, and an
open request must not keep the Pod until its grace period ends."""


class Serving:
    """The server of one engine. Create it before the engine: it takes the port."""

    def __init__(self, args: Namespace) -> None:
        from vllm.entrypoints.launchers.launcher import setup_server

        self._args = args
        _, self._socket = setup_server(args, reuse_port=False)
        self._shutdown: Any = None
        self._failure: BaseException | None = None

    async def build(self, engine: Any) -> Any:
        """Return vLLM's app with its built stack of middleware, for the caller to wrap."""
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        tasks = await engine.get_supported_tasks()
        app = build_app(self._args, tasks, engine.model_config)
        await init_app_state(engine, app.state, self._args, tasks)
        # vLLM may have built its middleware stack by now.
        app.middleware_stack = app.middleware_stack or app.build_middleware_stack()
        return app

    async def run(self, app: Any, beside: asyncio.Task[None], what: str) -> None:
        """Serve until a signal, or until `beside` fails. End the engine then, and `close`. `what`: the task, in the
        log."""
        from vllm.entrypoints.launchers.launcher import serve_http

        def stop(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                logger.error("%s failed; stopping", what, exc_info=task.exception())
                os.kill(os.getpid(), signal.SIGTERM)

        beside.add_done_callback(stop)
        args = self._args
        try:
            self._shutdown = await serve_http(
                app,
                sock=self._socket,
                host=args.host,
                port=args.port,
                log_level=args.uvicorn_log_level,
                access_log=not args.disable_uvicorn_access_log,
                timeout_graceful_shutdown=_ANSWER_SECONDS,
                timeout_keep_alive=_IDLE_SECONDS,
            )
        except psutil.Error:
            # After a signal vLLM describes any other process with this port. A forked engine has it, and may end
            # meanwhile.
            self._shutdown = app.state.server.shutdown()
        self._failure = beside.exception() if beside.done() else None
        if self._failure is None and not end_is_wanted():
            self._failure = TransientError("vLLM's engine ended; its log says why")
        await end_tasks(beside)

    async def close(self) -> None:
        """Raise the error that ended `run`, if one has."""
        await self._shutdown
        self._socket.close()
        if self._failure is not None:
            raise self._failure


def start_engine(args: Namespace) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    if current_platform.is_cpu():
        args.distributed_executor_backend = choose_cpu_executor(args)
        _import_model_class(args)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    if current_platform.is_cpu():
        # vLLM spawns on CPUs for thread binding. A forked engine inherits all imports.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    engine: Any = AsyncLLM.from_vllm_config(vllm_config=config, usage_context=UsageContext.OPENAI_API_SERVER)
    engine.shutdown = quiet_shutdown(engine.shutdown)
    return engine


def choose_cpu_executor(args: Namespace) -> str | None:
    """Return vLLM's executor; None leaves the choice to vLLM. One process for scheduler and worker saves an import of
    vLLM, a third of the startup time. vLLM would use two for thread binding, which is off here (build_environment)."""
    chosen: str | None = args.distributed_executor_backend
    if chosen is None and args.tensor_parallel_size * args.pipeline_parallel_size == 1:
        return "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    return chosen


def _import_model_class(args: Namespace) -> None:
    """Import the model's class here. vLLM would inspect it in a subprocess to keep the GPU untouched: 20 s with a cold
    cache. On CPUs the forked engine needs the import anyway."""
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry

    config = AutoConfig.from_pretrained(args.model, revision=args.revision, trust_remote_code=args.trust_remote_code)
    for architecture in config.architectures or ():
        registered = ModelRegistry.models.get(architecture)
        if registered is not None:
            ModelRegistry.register_model(architecture, registered.load_model_cls())
