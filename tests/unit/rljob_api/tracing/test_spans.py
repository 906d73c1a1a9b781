"""Spans: parents over tasks and processes, ends in all cases, and that nothing is recorded where nothing should be."""

import asyncio
import itertools

import pytest

from rljob_api.tracing import spans
from rljob_api.tracing.exporting import is_configured
from rljob_api.tracing.http_client import trace_configs
from rljob_api.tracing.recording import read_traceparent, write_traceparent
from tests.support.traces import recording


def test_off_nothing_is_made():
    assert spans.root("episode", {}) is spans.span("chat") is spans.resume("x") is spans.NOT_RECORDED
    assert (spans.current(), trace_configs()) == ("", [])
    with spans.root("episode", {"a": 1}) as span:
        span.set({"b": 2})
        span.fail("error")
        assert span.traceparent == ""


def test_a_tree_has_the_times_of_the_clock():
    ticks = itertools.count(100)
    with recording(clock=lambda: next(ticks)) as recorded:
        with spans.root("episode", {"rljob.step": 3}), spans.span("chat", {"a": None, "b": "x"}, kind="client"):
            pass
        [trace] = recorded.traces()
    assert trace.names() == ["episode", "chat"]
    [chat] = trace.named("chat")
    assert (trace.root.started_at, chat.started_at, chat.ended_at, trace.root.ended_at) == (100, 101, 102, 103)
    assert (dict(chat.attributes), chat.kind, dict(trace.root.attributes)) == ({"b": "x"}, "client", {"rljob.step": 3})


async def test_tasks_inherit_the_span_in_which_they_were_made():
    async def work(name):
        await asyncio.sleep(0)
        with spans.span(name):
            await asyncio.sleep(0)

    with recording() as recorded:
        with spans.root("episode", {}):
            await asyncio.gather(work("a"), work("b"))
        with spans.root("episode", {}):
            await work("c")
        first, second = recorded.traces()
    assert sorted(first.names()[1:]) == ["a", "b"]
    assert second.names() == ["episode", "c"]


def test_without_an_episode_there_is_no_span():
    with recording() as recorded:
        with spans.span("poll") as span:
            assert (span, spans.current()) == (spans.NOT_RECORDED, "")
        assert recorded.spans() == []


def test_a_root_has_no_parent_wherever_it_begins():
    with recording() as recorded:
        with spans.root(spans.STEP, {}), spans.root("episode", {}):
            pass
        assert all(not each.parent for each in recorded.spans())


@pytest.mark.parametrize(
    ("error", "failed", "attribute"),
    [
        (ValueError("7 of 3"), True, ("error.type", "ValueError")),
        (asyncio.CancelledError(), False, ("rljob.cancelled", True)),
        (KeyboardInterrupt(), True, ("error.type", "KeyboardInterrupt")),
    ],
)
def test_a_span_ends_however_its_block_ends(error, failed, attribute):
    with recording() as recorded:
        with pytest.raises(type(error)), spans.root("episode", {}), spans.span("chat"):
            raise error
        found = recorded.spans()
    assert [each.name for each in found] == ["chat", "episode"]
    assert all((each.failed, each.attributes.get(attribute[0])) == (failed, attribute[1]) for each in found)
    assert "7 of 3" not in str(found), "the text of an error may have parts of an answer"


def test_a_span_ends_once():
    with recording() as recorded:
        with spans.root("episode", {}) as span:
            span.end()
        assert len(recorded.spans()) == 1


def test_one_decision_holds_for_the_whole_trace():
    with recording(ratio=0.0) as recorded:
        with spans.root("episode", {}) as episode, spans.span("chat") as chat:
            assert (episode.traceparent, chat) == ("", spans.NOT_RECORDED)
            assert spans.current().endswith("-00"), "the flag says that it is not recorded"
        assert recorded.spans() == []


def test_a_part_of_the_episodes_is_recorded_and_each_step():
    with recording(ratio=0.3) as recorded:
        for _ in range(200):
            with spans.root("episode", {}), spans.span("chat"):
                pass
        for _ in range(20):
            with spans.root(spans.STEP, {}):
                pass
        assert 20 < len(recorded.traces()) < 120
        assert all(each.names() == ["episode", "chat"] for each in recorded.traces())
        assert len(recorded.traces(spans.STEP)) == 20


def test_a_span_continues_elsewhere_by_its_traceparent():
    with recording() as recorded:
        with spans.root("episode", {}) as span:
            parent = span.traceparent
        with spans.span("train", parent=parent, links=[parent, "not a traceparent"]):
            pass
        with spans.resume(parent), spans.span("reward"):
            pass
        with spans.resume(""), spans.span("lost"):
            pass
        [trace] = recorded.traces()
    assert trace.names() == ["episode", "train", "reward"]
    assert trace.named("train")[0].links == (trace.root.id,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
    ],
)
def test_what_is_no_traceparent_is_ignored(text):
    assert write_traceparent(read_traceparent(text)) == ""


def test_a_traceparent_is_read_as_written():
    text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    found = read_traceparent(text)
    assert write_traceparent(found) == text
    later = read_traceparent("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-of a later version")
    assert write_traceparent(later) == text


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_environment_names_a_collector(environ, expected):
    assert is_configured(environ) is expected
