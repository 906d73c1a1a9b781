"""When a job's episodes are traced."""

import pytest

from rljob_api.tracing import spans
from rljob_trainer.traces import begin_attempt, tracing_episodes
from tests.support.job_simulation import make_job
from tests.support.traces import Collector, recording


@pytest.mark.parametrize(("tracing", "has_endpoint"), [(None, True), ({"endpoint": "http://x:4318"}, False)])
def test_the_field_and_the_variable_are_needed(monkeypatch, tracing, has_endpoint):
    """Without the field, an operator that sets the variable in all Pods of a cluster traces no job."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    if has_endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://x:4318")
    with tracing_episodes(make_job(tracing=tracing)):
        assert not spans.is_on()


def test_episodes_are_traced_at_the_ratio_of_the_job(monkeypatch):
    collector = Collector("127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    for ratio in (0.0, 1.0):
        job = make_job(tracing={"endpoint": collector.url, "samplingRatio": ratio})
        with tracing_episodes(job), spans.root("episode", {}):
            pass
        assert len(collector.spans()) == ratio
    collector.close()


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("http://10.0.0.7:8080/v1/score", ("10.0.0.7", 8080)),
        ("https://scorer.example.com/key-51", ("scorer.example.com", 443)),
        ("http://scorer.example.com", ("scorer.example.com", 80)),
    ],
)
def test_an_attempt_names_its_server_and_not_the_path_of_an_endpoint(url, server):
    with recording() as recorded:
        with spans.root("episode", {}), begin_attempt(url, "/v1/score", 1):
            pass
        attempt, _ = recorded.spans()
    assert (attempt.attributes["server.address"], attempt.attributes["server.port"]) == server
    assert "key-51" not in str(attempt)
