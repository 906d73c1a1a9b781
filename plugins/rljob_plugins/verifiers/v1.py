"""Tasksets and environments of `verifiers.v1` (0.4): the episode, its harness and its scores are those of run_episode.

Without other args, the policy plays in the harness `null` (a chat with the task's tools) as a process of this Pod. An
agent of verifiers is a seat: where the policy plays several, each one that trains calls it by its own name, and
verifiers itself marks the requests of each run with its id. Standard library only.
"""

import asyncio
import hashlib
import itertools
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rljob_api.errors import UserError
from rljob_service.worker.environments.base import Seat
from rljob_service.worker.episodes.types import Access, Episode, Reply, SeatResult, model_of
from rljob_service.worker.forms.json_values import to_log

_OWN_MODULE: Final = "rljob_taskset"
_BASE_MODULE: Final = "verifiers.v1.env"
_KEY_VARIABLE: Final = "OPENAI_API_KEY"
"""Set for each episode."""
_SPLIT: Final = "train"
"""The name of all tasks: a taskset has no splits."""
_SEAT: Final = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


class V1Environment:
    def __init__(self, config: Mapping[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        _run_scripts_with_own_packages()
        self._environment = load_environment(resolve_env_config(_with_seats(config)))
        self._tasks: list[Any] | None = None
        self.seats = _find_seats(self._environment)
        self.shares = not has_own_servers(self._environment)
        """Whether several episodes may play at once."""

    async def play(self, episode: Episode, access: Access) -> Reply:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        environment = self._environment
        task = self._find_task(episode)
        trained = self._choose_trained(episode)
        self._seat_agents(episode, access, trained)
        client = EvalClientConfig(base_url=access.base_url, api_key_var=_KEY_VARIABLE)
        async with environment.serving():
            played = await environment.run_episode(task, ModelContext(access.name, client))
        errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        if not played.ok:
            last = f"{errors[-1].type}: {errors[-1].message}" if errors else "without a reason"
            raise RuntimeError(f"verifiers: the episode failed: {last}")
        return _read_one(played.traces) if trained is None else _read_seats(played.traces, trained)

    def _choose_trained(self, episode: Episode) -> Collection[str] | None:
        """Return the names of the seats that train; None if the policy plays one seat alone."""
        if episode.seats is not None:
            return episode.seats
        playing = [seat for seat in self.seats if seat.plays_policy]
        return None if len(playing) == 1 else [seat.name for seat in playing if seat.trains]

    def _seat_agents(self, episode: Episode, access: Access, trained: Collection[str] | None) -> None:
        """Limit the turns of each agent, and let each seat that trains call the policy by its own name."""
        config = self._environment.config
        plays_policy = {seat.name for seat in self.seats if seat.plays_policy}
        for name, agent in _agents(config).items():
            limit = min(agent.max_turns or episode.max_turns, episode.max_turns)
            changes = {"max_turns": limit}
            if trained is not None and name in plays_policy:
                changes |= {"model": model_of(access.name, name) if name in trained else access.name}
            setattr(config, name, agent.model_copy(update=changes))

    def _find_task(self, episode: Episode) -> Any:
        taskset = self._environment.taskset
        if not taskset.bounded:
            return next(itertools.islice(iter(taskset), find_index(episode, None), None))
        tasks = self._list_tasks()
        return tasks[find_index(episode, len(tasks))]

    def _list_tasks(self) -> list[Any]:
        if self._tasks is None:
            self._tasks = list(self._environment.taskset)
        return self._tasks

    def rows(self, split: str) -> Iterable[Mapping[str, Any]]:
        if split != _SPLIT:
            raise UserError(
                f"a taskset of verifiers has no split {split}: all its tasks are env://{_SPLIT}; hold some out with "
                "offset and limit"
            )
        if not self._environment.taskset.bounded:
            return (number_row(_read_row(task), number) for number, task in enumerate(self._environment.taskset))
        tasks = self._list_tasks()
        return Numbered(len(tasks), lambda number: _read_row(tasks[number]))


def _read_row(task: Any) -> dict[str, Any]:
    """Return the data of a task that differ from their defaults. Without a prompt, the environment opens."""
    row: dict[str, Any] = task.data.model_dump(mode="json", exclude_defaults=True)
    shown = task.data.model_dump(mode="json", include={"prompt"}, exclude_none=True)
    return {**row, "prompt": shown.get("prompt", "")}


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


def has_own_servers(environment: Any) -> bool:
    """Whether its `start` and `stop`, which `serving` calls around each episode, are not the empty ones of Env."""
    own = (kind for kind in type(environment).__mro__ if kind.__module__ != _BASE_MODULE)
    return any(name in vars(kind) for kind in own for name in ("start", "stop"))


def _agents(config: Any) -> dict[str, Any]:
    """Return the configs of the environment's agents by name."""
    from verifiers.v1.configs.agent import agent_config_fields

    agents: dict[str, Any] = agent_config_fields(config)
    return agents


def _find_seats(environment: Any) -> list[Seat]:
    agents = _agents(environment.config)
    excluded = asyncio.run(_find_excluded(environment))
    seats = [
        Seat(name, agent.model is None and agent.client is None, name not in excluded) for name, agent in agents.items()
    ]
    for name, agent in agents.items():
        if agent.client is not None and agent.model is None:
            raise UserError(
                f"agent.environment.args.{name}.model: required: its client is not the policy's; name its model, or "
                "remove the client, and the policy plays"
            )
    return seats


async def _find_excluded(environment: Any) -> set[str]:
    """Return the agents that `Env.setup` excludes from training, which it does once for each episode."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext

    context = ModelContext("policy", EvalClientConfig(base_url="http://localhost/v1", api_key_var=_KEY_VARIABLE))
    agents = environment._episode_agents(context, [], None, None)
    await environment.setup(agents)
    return {name for name in _agents(environment.config) if not getattr(agents, name).trainable}


def _with_seats(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with a harness and a runtime for each agent that has none: verifiers' own defaults are a shell,
    and a sandbox of a provider."""
    from verifiers.v1.utils.loaders import env_config_type

    kind = env_config_type(config["taskset"]["id"], config.get("id", ""))
    names = _agents(kind.model_construct())
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


def _read_one(traces: Sequence[Any]) -> Reply:
    """Return the reward of the only trace that trains. None if no function scored it."""
    trained = [trace for trace in traces if trace.agent.trainable]
    if len(trained) != 1:
        raise UserError(
            f"agent.environment: {trained[0].agent.name if trained else 'no agent'} played {len(trained)} times as the "
            "policy; set agent.seats, and each trains"
        )
    trace = trained[0]
    rewards = _rewards_of(trace)
    state = {"rewards": rewards, "metrics": trace.metrics, "end": trace.stop_condition}
    return Reply(trace.reward if rewards else None, state=to_log(state), info={"turns": trace.num_turns})


def _read_seats(traces: Sequence[Any], seats: Collection[str]) -> Reply:
    """Return the reward of each trace that trains. A seat that ran several times on one task is compared with itself in
    the episode: what it got depends on what the others made of that task."""
    trained = [trace for trace in traces if trace.agent.trainable and trace.agent.name in seats]
    runs = Counter((trace.agent.name, trace.task.hash) for trace in trained)
    results = [
        SeatResult(
            trace.agent.name,
            trace.id,
            trace.reward if _rewards_of(trace) else None,
            baseline="episode" if runs[trace.agent.name, trace.task.hash] > 1 else "group",
            info=to_log({**trace.metrics, **_rewards_of(trace), "turns": trace.num_turns, "end": trace.stop_condition}),
        )
        for trace in trained
    ]
    return Reply(seats=results)


def _rewards_of(trace: Any) -> dict[str, float]:
    return {name: reward.value for name, reward in trace.rewards.items() if reward is not None}


def find_index(episode: Episode, num_tasks: int | None) -> int:
    """Return the row's `index`. Raise UserError if the dataset has no such task. `num_tasks`: None if it is endless."""
    index = episode.columns.get("index")
    if not isinstance(index, int) or index < 0 or (num_tasks is not None and index >= num_tasks):
        has = "has no end" if num_tasks is None else f"has {num_tasks} tasks"
        raise UserError(f"column index: {index!r} is not a task of the environment, whose dataset {has}")
    return index


@dataclass(eq=False)
class Numbered:
    """The tasks of a dataset as rows."""

    _num_tasks: int
    _read: Callable[[int], Mapping[str, Any]]

    def __len__(self) -> int:
        return self._num_tasks

    def __getitem__(self, number: int) -> dict[str, Any]:
        return number_row(self._read(number), number)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(len(self)))


def number_row(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the row of a task: `find_index` finds it by its number. An answer may be null, and is never missing."""
    return {"answer": None, **row, "index": number}
