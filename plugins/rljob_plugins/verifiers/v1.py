"""Tasksets and environments of `verifiers.v1` (0.4): the episode, its harness and its scores are those of run_episode.

Without other args, the policy plays in the harness `null` (a chat with the task's tools) as a process of this Pod.
Standard library only.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import types
from collections.abc import Mapping
from typing import Any, Final

from rljob_api.errors import UserError
from rljob_plugins.verifiers.rows import find_index
from rljob_service.worker.episodes.types import Access, Episode, Reply
from rljob_service.worker.forms.json_values import to_log

_OWN_MODULE: Final = "rljob_taskset"
_KEY_VARIABLE: Final = "OPENAI_API_KEY"
"""Set for each episode."""
_SEAT: Final = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


class V1Environment:
    def __init__(self, config: Mapping[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        _run_scripts_with_own_packages()
        self._environment = load_environment(resolve_env_config(_with_seats(config)))
        self._tasks: list[Any] | None = None

    async def play(self, episode: Episode, access: Access) -> Reply:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        environment = self._environment
        task = self._find_task(episode)
        for name, seat in _seats(environment.config).items():
            limit = min(seat.max_turns or episode.max_turns, episode.max_turns)
            setattr(environment.config, name, seat.model_copy(update={"max_turns": limit}))
        client = EvalClientConfig(base_url=access.base_url, api_key_var=_KEY_VARIABLE)
        async with environment.serving():
            played = await environment.run_episode(task, ModelContext(access.name, client))
        errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        if not played.ok:
            last = f"{errors[-1].type}: {errors[-1].message}" if errors else "without a reason"
            raise RuntimeError(f"verifiers: the episode failed: {last}")
        return _read(played.traces, access)

    def _find_task(self, episode: Episode) -> Any:
        taskset = self._environment.taskset
        if not taskset.bounded:
            return next(itertools.islice(iter(taskset), find_index(episode, None), None))
        if self._tasks is None:
            self._tasks = list(taskset)
        return self._tasks[find_index(episode, len(self._tasks))]


def load(id: str, args: dict[str, Any]) -> V1Environment:
    """`args`: the fields of verifiers' EnvConfig, such as taskset, agent, id."""
    try:
        return V1Environment({**args, "taskset": {**args.get("taskset", {}), "id": id}})
    except ModuleNotFoundError as error:
        raise UserError(f"agent.environment.id: {error}; add its package to agent.environment.packages") from error


def adopt(value: Any, args: dict[str, Any]) -> V1Environment:
    """Give the class a module, since verifiers finds tasksets by the name of a module."""
    module = types.ModuleType(_OWN_MODULE)
    vars(module).update({"__all__": [value.__name__], value.__name__: value})
    sys.modules[_OWN_MODULE] = module
    return load(_OWN_MODULE, args)


def is_taskset(value: Any) -> bool:
    return any(f"{base.__module__}.{base.__name__}" == "verifiers.v1.taskset.Taskset" for base in _bases(value))


def _bases(value: Any) -> tuple[type, ...]:
    return value.__mro__[1:] if isinstance(value, type) else ()


def _seats(config: Any) -> dict[str, Any]:
    from verifiers.v1.configs.agent import agent_config_fields

    seats: dict[str, Any] = agent_config_fields(config)
    return seats


def _with_seats(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with a harness and a runtime for each agent that has none: verifiers' own defaults are a shell,
    and a sandbox of a provider."""
    from verifiers.v1.utils.loaders import env_config_type

    kind = env_config_type(config["taskset"]["id"], config.get("id", ""))
    names = _seats(kind.model_construct())
    return {**config, **{name: {**_SEAT, **config.get(name, {})} for name in names}}


def _run_scripts_with_own_packages() -> None:
    """Let harnesses run their programs in the interpreter of this process.

    verifiers installs their packages with uv, into a cache that it expects to stay. A worker's files are removed after
    each episode, and a Pod may not reach a package index.
    """
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    async def prepare_uv_script(self: Any, script: str | bytes, *args: Any, **kwargs: Any) -> list[str]:
        data = script.encode() if isinstance(script, str) else script
        name = f"{hashlib.sha256(data).hexdigest()}.py"
        await self.write(name, data)
        return [sys.executable, name]

    SubprocessRuntime.prepare_uv_script = prepare_uv_script


def _read(traces: Any, access: Access) -> Reply:
    """Return the reward of the only trace that trains. None if no function scored it."""
    trained = [trace for trace in traces if trace.agent.trainable]
    others = [trace.agent.name for trace in traces if trace not in trained and _plays_policy(trace, access)]
    if others or len(trained) != 1:
        names = ", ".join(others or [trace.agent.name for trace in trained])
        raise UserError(
            f"agent.environment: one agent plays as the policy, and RLJob trains it; found {names or 'none'}; give the "
            "others a model and a client in agent.environment.args"
        )
    trace = trained[0]
    scored = any(reward is not None for reward in trace.rewards.values())
    state = {"rewards": {name: reward.value for name, reward in trace.rewards.items() if reward is not None}}
    state |= {"metrics": trace.metrics, "end": trace.stop_condition}
    return Reply(trace.reward if scored else None, state=to_log(state), info={"turns": trace.num_turns})


def _plays_policy(trace: Any, access: Access) -> bool:
    client = trace.agent.config.client
    return client is not None and client.base_url == access.base_url
