"""The reward that this server runs: its settings, its source, and the digest of what decides a score.

Reads files; never runs user code. Errors are UserErrors that name the path.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.manifest.reward import FunctionReward, Reward, Scope
from rljob_api.manifest.scorers import JudgeReward, ModelReward
from rljob_api.wire.contract import FILE_FUNCTION
from rljob_reward.worker.loading import Settings

_NO_MATTER_OF_SCORE = ("gpus", "max_batched_tokens", "kv_cache_gib", "gpu_memory_utilization", "image", "resources")


@dataclass(frozen=True)
class Program:
    """One reward, ready to be started."""

    name: str
    slots: int
    queue_length: int
    timeout_seconds: float
    backend: Settings | JudgeReward | ModelReward
    """What its pool needs: for a function, what a worker is told."""
    version: str
    """sha256 of source, settings and images: results of different versions do not compare."""
    cache: bool = False
    """Whether equal requests share a result."""
    kind: str = "function"
    """For messages: function, judge or model."""
    scope: Scope = "sample"
    """What is scored at once."""


def read_program(config_path: Path, function_path: Path | None = None, images: str = "") -> Program:
    """The Reward of `config_path` with the source that it names, or that of `function_path`; `images` are those that
    it runs in."""
    reward = _read_reward(config_path)
    scorer = reward.judge or reward.model
    if scorer is not None:
        backend: Settings | JudgeReward | ModelReward = scorer
        settings = _read_scorer(scorer) | {"scope": reward.scope}
    elif reward.function is not None:
        backend = _build_settings(reward.function, reward.scope, config_path, function_path)
        settings = _read_function(backend)
    else:
        raise UserError(f"{config_path}: reward {reward.name} is served elsewhere: it has no function, model or judge")
    return Program(
        name=reward.name,
        slots=reward.slots,
        queue_length=reward.queue_length,
        timeout_seconds=reward.timeout_seconds,
        cache=reward.cache,
        backend=backend,
        version=_digest(settings | {"timeout_seconds": reward.timeout_seconds, "images": images}),
        kind=reward.kind,
        scope=reward.scope,
    )


def _build_settings(function: FunctionReward, scope: Scope, config_path: Path, function_path: Path | None) -> Settings:
    module = function.module if function_path is None else None
    path, source = (module, "") if module else _read_source(function, config_path, function_path)
    return Settings(
        source=source,
        path=path,
        entrypoint=function.entrypoint,
        signature=function.signature,
        kwargs=function.kwargs,
        max_memory_mib=function.max_memory_mib,
        module=module,
        max_file_mib=function.max_file_mib,
        max_processes=function.max_processes,
        network=function.network,
        cpu_seconds=function.cpu_seconds,
        requirements=tuple(function.requirements),
        scope=scope,
    )


def _read_reward(path: Path) -> Reward:
    try:
        return Reward.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}. --config names one Reward as YAML") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: no YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'reward'}: {e['msg']}" for e in error.errors())
        raise UserError(f"{path}: {wrong}") from error


def _read_source(function: FunctionReward, config_path: Path, override: Path | None) -> tuple[str, str]:
    """Path and text: the override, an absolute function.file, function.py beside the config, or the inline text."""
    path = override
    if path is None and function.file is not None and Path(function.file).is_absolute():
        path = Path(function.file)
    if path is None:
        path = config_path.parent / FILE_FUNCTION
        if not path.exists() and function.inline is not None:
            return "function.inline", function.inline
    try:
        return str(path.absolute()), path.read_text()
    except OSError as error:
        raise UserError(f"{path}: the reward's source cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the reward's source is no UTF-8 text: {error}") from error


def _read_scorer(scorer: JudgeReward | ModelReward) -> dict[str, Any]:
    """What decides a score: template, model, parser. Where and how fast the model runs is left out."""
    parts = scorer.model_dump(mode="json", exclude={"endpoint": {"limits", "api_key_secret_ref"}})
    for model in (parts, parts.get("model") or {}):
        for name in _NO_MATTER_OF_SCORE:
            model.pop(name, None)
    return parts


def _read_function(settings: Settings) -> dict[str, Any]:
    """Where files lie is left out: the same function elsewhere is the same function."""
    return {name: value for name, value in settings._asdict().items() if name not in ("path", "python", "scratch")}


def _digest(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
