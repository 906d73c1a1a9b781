"""`promtool check metrics` finds nothing in the metrics of each role, whatever users call their rewards and tools."""

from __future__ import annotations

import asyncio
import re
import subprocess

from prometheus_client import generate_latest

from rljob_api.run.metrics import CheckpointRecord, EvaluationRecord, StepRecord
from rljob_operator.metrics import OperatorMetrics
from rljob_service.models.metrics import UpstreamMetrics
from rljob_service.server.metrics import ServerMetrics
from rljob_trainer.episodes.types import ContextBreak, Episode, EpisodeEnd, EpisodeFailure, ScoredResult, ToolCall, Turn
from rljob_trainer.history.delivery import Delivery
from rljob_trainer.history.metrics import summarize_episodes, summarize_schedule
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.tracking import Trackers
from tests.integration.monitoring import prometheus_tools
from tests.integration.monitoring.running_job import AgentService
from tests.support.episodes import episode

ODD = "histogram_count_total acc@1"
"""A name of the user's, of words that promtool refuses in a metric."""


class RewardService(AgentService):
    timeout_seconds = 20.0

    def statistics(self):
        return super().statistics() | {"hedges": 0, "hedge_wins": 0, "rescored": 0}


def play() -> Episode:
    failure = EpisodeFailure("user", "spec.agent.user", "timeout", "killed")
    result = ScoredResult(id="x", valid=True, score=1.0, components={ODD: 1.0})
    talk = episode(messages=[{}], end=EpisodeEnd.FAILED, failure=failure, breaks=[ContextBreak("history")])
    talk.turns, talk.results = [Turn("a", tool_calls=[ToolCall("0", "add", {}, tool=ODD)])], {ODD: result}
    return talk


def render_driver() -> bytes:
    metrics, played = PrometheusMetrics(), play()
    metrics.register_rewards({ODD: RewardService()})
    metrics.register_agent({ODD: AgentService()})
    metrics.register_gateway(lambda: {"episodes": 1.0, "in_flight": 1.0, "oldest_seconds": 0.1})
    metrics.register_service(lambda: {"clients": 1, "adapters": 1})
    asyncio.run(metrics.measure("ann", "optim_step", asyncio.sleep(0)))
    metrics.register_trackers(Trackers([Delivery("mlflow", lambda: None)]).counts)
    metrics.record_response("chat/completions", "policy", 200)
    metrics.record_scored("train", played)
    record = StepRecord(
        step=1,
        **vars(summarize_episodes([played])),
        **vars(summarize_schedule({0: 10, 2: 5}, {"trainer": 0.5}, 0)),
        reward=0.5,
        components={ODD: 1.0},
        rewards={ODD: 1.0},
        reward_versions={ODD: 1},
        phase_seconds={"update": 1.0},
    )
    metrics.log(record)
    parts = vars(summarize_episodes([played]))
    metrics.log(EvaluationRecord(step=1, **parts, accuracy=0.5, means={ODD: 1.0}))
    metrics.log(CheckpointRecord(step=1, wait_seconds=0.1, write_seconds=0.2))
    return metrics.render()


def render_reward() -> bytes:
    metrics = ServerMetrics(ODD, 4)
    metrics.record_result("train", "valid", 0.1, 0.2)
    metrics.record_response("200")
    metrics.record_cache("hit")
    upstream = UpstreamMetrics(metrics.registry, ODD)
    upstream.record_wait("requests", 1.0)
    return metrics.render()


def check(text: bytes) -> None:
    done = subprocess.run(
        [prometheus_tools.find("promtool"), "check", "metrics"], input=text, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (0, "", "")


def test_metrics_of_the_driver():
    text = render_driver()
    assert f'rljob_step_components{{component="{ODD}"}} 1.0' in text.decode()
    assert f'rljob_eval_means{{component="{ODD}",set="eval"}} 1.0' in text.decode()
    assert f'rljob_step_agent_tools_calls{{tool="{ODD}"}} 1.0' in text.decode()
    names = set(re.findall(r"^(\w+)", text.decode(), re.M))
    assert not [name for name in names if "acc" in name.split("_")]
    check(text)


def test_metrics_of_a_reward_server():
    check(render_reward())


def test_metrics_of_the_operator():
    check(generate_latest(OperatorMetrics(["pods"]).registry))
