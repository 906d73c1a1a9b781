"""A Task class of verifiers 0.4: methods marked with @reward and @metric, which score a trace.

Builds the Task of each row and a Trace with the prompt and all that followed it, as its own rollout does, and lets the
Task score it. A reward that requires a runtime (a container of the rollout) is refused.
"""

import importlib
import json
from collections.abc import Mapping
from typing import Any

from rljob_api.functions.values import Sample, as_whole, read_completion_messages
from rljob_service.worker.forms.binding import Binding
from rljob_service.worker.forms.outcome import BAD_RETURN, Outcome, invalid, read_score


def bind(cls: Any, name: str, options: Mapping[str, Any], scope: str) -> Binding:
    """Return the binding of a Task class. `options` are fields of its config."""

    async def score(samples: list[Sample]) -> Any:
        made = _make_task(cls, samples[0], options)
        trace = _make_trace(made, as_whole(samples[0]))
        await made.score(trace)
        return trace

    return Binding(score, lambda trace, samples: [_read(trace, name)], frozenset(("whole",)), is_async=True)


def _make_task(cls: Any, sample: Sample, options: Mapping[str, Any]) -> Any:
    row = sample.get("extra_info", {})
    answer = sample.get("ground_truth")
    fields = {"answer": answer, "ground_truth": answer, **row, "prompt": sample["prompt"], "idx": row.get("index")}
    return cls(cls.data_type().model_validate(fields), cls.config_type()(**options))


def _make_trace(made: Any, sample: Sample) -> Any:
    trace, graph, types = (importlib.import_module(f"verifiers.v1.{name}") for name in ("trace", "graph", "types"))
    agent, state = (importlib.import_module(f"verifiers.v1.{name}") for name in ("configs.agent", "state"))
    prompt, completion = sample["prompt"], read_completion_messages(sample)
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    replies = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    nodes = [
        graph.MessageNode(
            message=_make_message(message, types),
            parent=index - 1 if index else None,
            sampled=index >= len(given) and message["role"] == "assistant",
        )
        for index, message in enumerate([*given, *replies])
    ]
    return trace.Trace(
        task=trace.TraceTask(type=type(made).__name__, data=made.data, key=made.key, hash=made.hash),
        state=state.state_cls(type(made))(),
        agent=trace.AgentInfo(config=agent.AgentConfig()),
        nodes=nodes,
    )


def _make_message(message: Mapping[str, Any], types: Any) -> Any:
    content = message["content"]
    if message["role"] == "tool":
        return types.ToolMessage(tool_call_id=message["tool_call_id"], name=message.get("name"), content=content)
    if message["role"] != "assistant":
        kinds = {"system": types.SystemMessage, "user": types.UserMessage}
        return kinds[message["role"]](content=content)
    calls = [
        types.ToolCall(
            id=call["id"], name=call["function"]["name"], arguments=_write_arguments(call["function"]["arguments"])
        )
        for call in message.get("tool_calls") or ()
    ]
    reasoning = message.get("reasoning_content")
    return types.AssistantMessage(content=content, reasoning_content=reasoning, tool_calls=calls or None)


def _write_arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _read(trace: Any, name: str) -> Outcome:
    rewards = {key: reward for key, reward in trace.rewards.items() if reward is not None}
    if not rewards:
        return invalid(BAD_RETURN, f"{name} has no method with @reward that scores without a runtime")
    components = {**{key: reward.value for key, reward in rewards.items()}, **trace.metrics}
    return read_score(sum(reward.value for reward in rewards.values()), components.items(), "numbers")
