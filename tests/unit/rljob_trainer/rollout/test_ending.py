"""The log at the end of a healthy rollout has no traceback."""

import logging

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from rljob_trainer.rollout.ending import _ENGINE_LOG, is_wanted, quiet_shutdown


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
    calls = []
    shutdown = quiet_shutdown(lambda timeout: calls.append(timeout))
    fail(engine_log, EngineDeadError())
    assert "output_handler failed" in caplog.text, "an end without a signal"
    assert not is_wanted()
    caplog.clear()
    shutdown(timeout=3)
    assert is_wanted()
    shutdown()
    fail(engine_log, EngineDeadError())
    assert not caplog.records
    assert calls == [3, None]
    assert len(engine_log.filters) == 1
    fail(engine_log, ValueError("a bug"))
    assert "a bug" in caplog.text
