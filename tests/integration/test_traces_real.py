"""`rljob run` with a conversation, a tool and a judge: one trace of an episode over all of its programs; nightly, as
OpenTelemetry's own collector takes it and passes it on.

`pytest tests/integration/test_traces_real.py -m slow -s` prints the tree, and with --update-golden draws the picture in
docs/tracing.md.
"""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from rljob_cluster.host.go_programs import OWN_ADDONS, find_or_build_addon
from tests.integration.test_conversations_real import RUN_SECONDS, write_job
from tests.paths import ROOT
from tests.support.fake_endpoint import Endpoint, completion
from tests.support.judge_servers import judge_reward, new_address
from tests.support.local_run import run_to_end
from tests.support.released_collector import ReleasedCollector
from tests.support.traces import Collector, Seen, Trace, group_traces
from tests.support.waiting import wait_for

PICTURE = ROOT / "docs/images/trace.svg"
pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector(new_address())
    yield running
    running.close()


@pytest.fixture(params=["direct", pytest.param("through a collector", marks=pytest.mark.nightly)])
def released(
    tmp_path: Path, collector: Collector, request: pytest.FixtureRequest
) -> Iterator[ReleasedCollector | None]:
    """The collector on the way, which is built for some minutes; None: spans go to the test's receiver at once."""
    if request.param == "direct":
        yield None
        return
    running = ReleasedCollector(tmp_path, new_address(), forward_to=collector.url)
    yield running
    running.close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    running = Endpoint(new_address())
    running.answer = lambda body, number: completion(f"Score: {number % 4}")
    yield running
    running.close()


def add_traces(path: Path, collector: str, endpoint: Endpoint) -> Path:
    job = yaml.safe_load(path.read_text())
    job["spec"]["tracing"] = {"endpoint": collector, "samplingRatio": 1}
    job["spec"]["rewards"].append(judge_reward(endpoint.url, {}, name="judge"))
    path.write_text(yaml.safe_dump(job))
    return path


def test_an_episode_is_one_trace(
    tmp_path: Path,
    collector: Collector,
    released: ReleasedCollector | None,
    endpoint: Endpoint,
    request: pytest.FixtureRequest,
) -> None:
    url = collector.url if released is None else released.url
    done = run_to_end(add_traces(write_job(tmp_path), url, endpoint), tmp_path, RUN_SECONDS)
    assert done.returncode == 0, done.stdout
    traces = group_traces(collector.spans() if released is None else passed_on(released, collector))
    assert all(len([each for each in trace.spans if not each.parent]) == 1 for trace in traces), "whole trees"
    episodes = [each for each in traces if each.root.name == "episode"]
    assert len(episodes) == len([each for each in traces if each.root.name != "step"])
    trained = [each for each in episodes if each.named("train")]
    assert len(trained) == 32, "two steps of 16 episodes"
    longest = max(trained, key=lambda each: len(each.spans))
    print(f"\n{longest.render()}")
    if request.config.getoption("--update-golden"):
        draw(longest)
    check_tree(longest)
    links = {
        link for each in traces if each.root.name == "step" for apply in each.named("apply") for link in apply.links
    }
    assert links == {each.root.id for each in trained}


@pytest.mark.nightly
def test_configuration_of_make_collector_is_valid() -> None:
    command = [find_or_build_addon("otelcol"), "validate", "--config", OWN_ADDONS["otelcol"] / "print.yaml"]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def passed_on(released: ReleasedCollector, collector: Collector) -> list[Seen]:
    """Return all spans that the released collector took. It must have refused none."""
    accepted = released.count_spans("receiver_accepted")
    assert (released.count_spans("receiver_refused"), released.count_spans("receiver_failed")) == (0, 0)
    wait_for(lambda: len(collector.spans()) >= accepted, f"{accepted} spans")
    spans = collector.spans()
    assert len(spans) == accepted > 0
    print(f"\nthe collector took {accepted} spans, and refused none")
    return spans


def draw(trace: Trace) -> None:
    console = Console(file=io.StringIO(), record=True, width=140, force_terminal=True, color_system="truecolor")
    console.print(trace.draw())
    title = "one episode: two turns with a simulated user, a reward, a judge"
    PICTURE.write_text(console.export_svg(title=title, unique_id="trace"))


def check_tree(trace: Trace) -> None:
    names = {each.name for each in trace.spans}
    assert {"turn 0", "turn 1", "chat policy", "user", "reward judge", "chat gpt-judge", "queue", "execute"} <= names
    assert {each.service for each in trace.spans} == {"rljob-head", "rljob-reward", "rljob-agent"}
    by_id = {each.id: each for each in trace.spans}
    assert all(each.parent in by_id for each in trace.spans if each.parent), "no span is missing"
    assert all(each.ended_at >= each.started_at for each in trace.spans)
