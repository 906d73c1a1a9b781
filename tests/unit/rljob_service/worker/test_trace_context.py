"""The trace of a request, as the user's code finds it."""

import asyncio
import os

from opentelemetry import trace

from rljob_service.worker import trace_context
from rljob_service.worker.episodes.types import Access
from rljob_service.worker.episodes.variables import build_variables
from rljob_service.worker.process.frames import add_traceparent, split_traceparent

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_code_finds_it_in_its_environment_and_in_opentelemetry(monkeypatch):
    monkeypatch.delenv("TRACEPARENT", raising=False)
    with trace_context.within(PARENT):
        assert os.environ["TRACEPARENT"] == PARENT
        assert f"{trace.get_current_span().get_span_context().span_id:016x}" == "00f067aa0ba902b7"
    assert "TRACEPARENT" not in os.environ
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_request_without_a_trace_changes_nothing(monkeypatch):
    monkeypatch.setenv("TRACEPARENT", "of the container")
    with trace_context.within(""):
        assert os.environ["TRACEPARENT"] == "of the container"


async def test_requests_that_run_together_have_their_own():
    async def run(traceparent):
        with trace_context.within(traceparent, is_alone=False):
            await asyncio.sleep(0)
            found = trace.get_current_span().get_span_context()
            return trace_context.current(), f"{found.span_id:016x}", os.environ.get("TRACEPARENT")

    other = PARENT.replace("00f067aa0ba902b7", "1111111111111111")
    first, second = await asyncio.gather(run(PARENT), run(other))
    assert (first, second) == ((PARENT, "00f067aa0ba902b7", None), (other, "1" * 16, None))


def test_an_episode_has_it_among_its_variables():
    access = Access("http://127.0.0.1:1", "key", "policy")
    assert "TRACEPARENT" not in build_variables(access)
    with trace_context.within(PARENT, is_alone=False):
        assert build_variables(access)["TRACEPARENT"] == PARENT


def test_a_frame_has_the_trace_before_the_body():
    body = b'{"id": "r1", "completion": "00-a\\n"}'
    assert split_traceparent(add_traceparent(body, PARENT)) == (PARENT, body)
    assert add_traceparent(body, "") is body
    assert split_traceparent(body) == ("", body)
