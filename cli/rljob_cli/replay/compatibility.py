"""How the job of a replay differs from the job of the run, and what may not differ. Pure.

The recorded tokens, log-probs and scores are data of a replay: what they depend on must be as it was. All else, such as
the algorithm and the optimizer, may change: to see its effect on the same episodes is what replays are for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Spec = Mapping[str, Any]
"""The spec of a job as YAML has it, with all defaults."""
_READ: Mapping[str, tuple[str, ...]] = {
    "model": (),
    "algorithm": (),
    "schedule": (),
    "trainer": (),
    "rewards": (),
    "rollout": ("sampling",),
    "agent": ("type", "rewardWeight"),
}
"""Sections that an update depends on, and their fields; (): all."""
_REQUIRED = {
    "model.source": "the recorded tokens are those of its tokenizer",
    "model.revision": "the recorded tokens are those of its tokenizer",
    "algorithm.groupSize": "groups are as they were recorded",
    "schedule.promptsPerStep": "steps are as they were recorded",
    "rollout.sampling.temperature": "the recorded log-probs are those of this temperature",
    "agent.type": "the recorded episodes are those of this agent",
}


@dataclass(frozen=True)
class Change:
    path: str
    before: Any
    now: Any

    def describe(self) -> str:
        return f"{self.path}: {_show(self.before)} -> {_show(self.now)}"


def find_changes(before: Spec, now: Spec) -> list[Change]:
    """Return the fields of a replay that differ from those of the run, of what updates depend on."""
    return [
        change
        for section in _READ
        for change in _compare(f"spec.{section}", _read(before, section), _read(now, section))
    ]


def find_obstacles(before: Spec, now: Spec, checkpoint: int | None) -> list[str]:
    """Return why the job cannot replay the run, with the remedy. `checkpoint`: its step; None: the initial model."""
    found = [
        f"spec.{path} must be {_show(_get(before, path))}, as in the run, got {_show(_get(now, path))}: {why}"
        for path, why in _REQUIRED.items()
        if _get(before, path) != _get(now, path)
    ]
    scored = _list_training_rewards(before)
    if new := [name for name in _list_training_rewards(now) if name not in scored]:
        found.append(
            f"spec.rewards: the run has no results of {', '.join(new)}, and a replay asks no reward; remove it"
        )
    if checkpoint is not None:
        remedy = "restore it, or pass --steps 1:N to start from the initial model"
        found += [
            f"{problem}; {remedy}" for problem in _compare_state(f"the checkpoint of step {checkpoint}", before, now)
        ]
    return found


def _list_training_rewards(spec: Spec) -> list[str]:
    """Return the names of the rewards that score training episodes."""
    return [reward["name"] for reward in spec.get("rewards") or [] if reward.get("use") != "evaluation"]


def _compare_state(checkpoint: str, before: Spec, now: Spec) -> Iterator[str]:
    if _get(before, "trainer.lora") != _get(now, "trainer.lora"):
        yield f"spec.trainer.lora must be as in the run: {checkpoint} has its parameters"
    if _get(now, "algorithm.type") == "ppo" != _get(before, "algorithm.type"):
        yield f"spec.algorithm.type: ppo has a critic, and {checkpoint} has none"


def _read(spec: Spec, section: str) -> Any:
    values, names = spec.get(section), _READ[section]
    return {name: values.get(name) for name in names} if names and isinstance(values, Mapping) else values


def _compare(path: str, before: Any, now: Any) -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in sorted({*before, *now}):
            yield from _compare(f"{path}.{name}", before.get(name), now.get(name))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            yield from _compare(f"{path}[{index}]", *pair)
    elif before != now:
        yield Change(path, before, now)


def _get(spec: Spec, path: str) -> Any:
    found: Any = spec
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _show(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
