"""The end of vLLM's own server, with an engine that is none."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from argparse import Namespace
from types import SimpleNamespace

import psutil
import pytest
from starlette.applications import Starlette

from rljob_trainer.replicas.http import IDLE_SECONDS
from rljob_trainer.rollout.vllm_app import _ENGINE_LOG, Serving, end_is_wanted, quiet_shutdown
from tests.support.waiting import DEADLINE_SECONDS


@pytest.fixture
def launcher():
    from vllm.entrypoints.launchers import launcher

    return launcher


@pytest.fixture
def app(monkeypatch):
    monkeypatch.setattr(logging.getLogger(_ENGINE_LOG), "filters", [])
    app = Starlette()
    app.state.engine_client = SimpleNamespace(
        vllm_config=SimpleNamespace(shutdown_timeout=0),
        shutdown=quiet_shutdown(lambda timeout: None),
        errored=False,
    )
    return app


@pytest.fixture
def serving(monkeypatch, launcher):
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    monkeypatch.setattr(launcher, "setup_server", lambda args, reuse_port: ("", listener))
    yield Serving(Namespace(host=host, port=port, uvicorn_log_level="error", disable_uvicorn_access_log=True))
    listener.close()


@pytest.mark.parametrize("error", [psutil.NoSuchProcess(7), psutil.ZombieProcess(7), None])
async def test_signal_is_a_success_when_the_engine_ends_while_vllm_describes_it(
    serving, app, launcher, monkeypatch, error
):
    class Engine:
        def cmdline(self):
            if error is not None:
                raise error
            return ["engine"]

    monkeypatch.setattr(launcher, "find_process_using_port", lambda port: Engine())
    beside = asyncio.create_task(asyncio.Event().wait())
    run = asyncio.create_task(serving.run(app, beside, "the weight puller"))
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not getattr(getattr(app.state, "server", None), "started", False):
            await asyncio.sleep(0.01)
            assert not run.done()
    assert app.state.server.config.timeout_keep_alive > IDLE_SECONDS, "the driver closes idle connections first"
    os.kill(os.getpid(), signal.SIGTERM)
    await run
    await serving.close()
    assert beside.cancelled()
    assert not app.state.server.servers[0].is_serving(), "the open server was shut down"


@pytest.fixture
def engine_log():
    log = logging.getLogger(_ENGINE_LOG)
    before = list(log.filters), log.propagate
    log.propagate = True
    yield log
    log.filters[:], log.propagate = before


def fail(log, error):
    try:
        raise error
    except Exception:
        log.exception("AsyncLLM output_handler failed.")


def test_only_an_end_that_is_wanted_is_quiet(engine_log, caplog):
    from vllm.v1.engine.exceptions import EngineDeadError

    calls = []
    shutdown = quiet_shutdown(lambda timeout: calls.append(timeout))
    fail(engine_log, EngineDeadError())
    assert "output_handler failed" in caplog.text, "an end without a signal"
    assert not end_is_wanted()
    caplog.clear()
    shutdown(timeout=3)
    assert end_is_wanted()
    shutdown()
    fail(engine_log, EngineDeadError())
    assert not caplog.records
    assert calls == [3, None]
    assert len(engine_log.filters) == 1
    fail(engine_log, ValueError("a bug"))
    assert "a bug" in caplog.text
