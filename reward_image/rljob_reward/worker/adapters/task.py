"""A Task class of verifiers 0.4: methods marked with @reward and @metric, which score a trace.

Builds the Task of each row and a Trace with the prompt and the completion, as its own rollout does, and lets the Task
score it. A reward that requires a runtime (a container of the rollout) is refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from rljob_reward.worker.adapters.binding import Binding
from rljob_reward.worker.adapters.outcome import BAD_RETURN, Outcome, invalid, read_score
from rljob_reward.worker.adapters.values import Sample


def bind(cls: Any, name: str, options: Mapping[str, Any]) -> Binding:
    """Return the binding of a Task class. `options` are fields of its config."""

    async def score(samples: list[Sample]) -> Any:
        made = _make_task(cls, samples[0], options)
        trace = _make_trace(made, samples[0])
        await made.score(trace)
        return trace

    return Binding(score, lambda trace, samples: [_read(trace, name)])


def _make_task(cls: Any, sample: Sample, options: Mapping[str, Any]) -> Any:
    row = sample.get("extra_info", {})
    answer = sample.get("ground_truth")
    fields = {"answer": answer, "ground_truth": answer, **row, "prompt": sample["prompt"], "idx": row.get("index")}
    return cls(cls.data_type().model_validate(fields), cls.config_type()(**options))


def _make_trace(made: Any, sample: Sample) -> Any:
    trace, graph, types = (importlib.import_module(f"verifiers.v1.{name}") for name in ("trace", "graph", "types"))
    agent, state = (importlib.import_module(f"verifiers.v1.{name}") for name in ("configs.agent", "state"))
    prompt = sample["prompt"]
    kinds = {"system": types.SystemMessage, "user": types.UserMessage, "assistant": types.AssistantMessage}
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [kinds[message["role"]](content=message["content"]) for message in given]
    nodes = [graph.MessageNode(message=m, parent=i - 1 if i else None) for i, m in enumerate(messages)]
    reply = types.AssistantMessage(content=sample["completion"])
    nodes.append(graph.MessageNode(message=reply, parent=len(nodes) - 1 if nodes else None, sampled=True))
    return trace.Trace(
        task=trace.TraceTask(type=type(made).__name__, data=made.data, key=made.key, hash=made.hash),
        state=state.state_cls(type(made))(),
        agent=trace.AgentInfo(config=agent.AgentConfig()),
        nodes=nodes,
    )


def _read(trace: Any, name: str) -> Outcome:
    rewards = {key: reward for key, reward in trace.rewards.items() if reward is not None}
    if not rewards:
        return invalid(BAD_RETURN, f"{name} has no method with @reward that scores without a runtime")
    components = {**{key: reward.value for key, reward in rewards.items()}, **trace.metrics}
    return read_score(sum(reward.value for reward in rewards.values()), components.items(), "numbers")
