"""Spans on their way to a collector."""

import logging
import sys

import pytest
from opentelemetry.semconv.schemas import Schemas

from rljob_api import __version__
from rljob_api.tracing import spans
from rljob_api.tracing.exporting import exporting
from tests.support.traces import Collector


@pytest.fixture
def collector(monkeypatch):
    running = Collector("127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
    yield running
    running.close()


def record():
    with spans.root("episode", {"a": 1}), spans.span("chat", kind="client"):
        pass


def test_all_spans_are_sent_at_the_end_with_headers_and_the_names_of_the_process(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=rl,authorization=Bearer%20k")
    with exporting("rljob-head", {"rljob.job": "sums"}, ratio=1.0):
        assert spans.is_on()
        record()
    assert not spans.is_on()
    chat, episode = collector.spans()
    assert (chat.name, chat.parent, chat.kind, episode.attributes) == ("chat", episode.id, "client", {"a": 1})
    assert (episode.service, episode.resource["service.version"]) == ("rljob-head", __version__)
    name, version, schema = episode.scope
    assert (name, version) == ("rljob", __version__)
    assert schema in {each.value for each in Schemas}, "OpenTelemetry has published it"
    headers = {name.lower(): value for name, value in collector.headers[0].items()}
    assert (headers["x-team"], headers["authorization"]) == ("rl", "Bearer k")


def test_the_names_of_the_environment_take_precedence(collector, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,team=rl")
    with exporting("rljob-head", {}, ratio=1.0):
        record()
    assert {each.service for each in collector.spans()} == {"mine"}


def test_without_a_ratio_a_process_begins_no_trace(collector):
    with exporting("rljob-reward", {}):
        record()
        with spans.span("execute", parent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"):
            pass
    assert [each.name for each in collector.spans()] == ["execute"]


def test_an_image_without_the_package_works_without_traces(collector, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "rljob_api.tracing.recording", None)
    with caplog.at_level(logging.WARNING), exporting("rljob-head", {}, ratio=1.0):
        record()
        assert not spans.is_on()
    assert "install opentelemetry-exporter-otlp-proto-http in the image" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "99999"),
        ("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "none"),
    ],
)
def test_a_variable_that_the_sdk_refuses_costs_the_traces_alone(collector, monkeypatch, caplog, name, value):
    monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING), exporting("rljob-head", {}, ratio=1.0):
        record()
        assert not spans.is_on()
    assert "OTEL_* has a value that OpenTelemetry refuses" in caplog.text
