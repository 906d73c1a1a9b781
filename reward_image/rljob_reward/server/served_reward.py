"""The reward that this server runs: its settings, its source, and the digest of everything that decides a score.

Reads files; never runs user code. Errors are UserErrors that name the path.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.manifest.reward import FunctionReward, Reward, Scope
from rljob_api.manifest.runner import COMMAND_MODULE
from rljob_api.manifest.scorers import JudgeReward, ModelReward
from rljob_api.manifest.simulated_user import UserModel, UserModelService
from rljob_api.read.pod_files import drop_unknown_fields
from rljob_api.wire.contract import FILE_FUNCTION
from rljob_reward.worker.settings import EPISODES, SCORE, SCORE_NEUTRAL_FIELDS, USER, FunctionSettings

_SCORE_NEUTRAL_FIELDS = ("gpus", "max_batched_tokens", "kv_cache_gib", "gpu_memory_utilization", "image", "resources")


Backend = FunctionSettings | JudgeReward | ModelReward | UserModel


class ServedReward(NamedTuple):
    """One reward, ready to be started."""

    config: Reward
    backend: Backend
    """What its pool needs; for a function, the settings of a worker."""
    version: str
    """sha256 of source, settings and images: scores of different versions are not comparable."""
    serves: str = SCORE
    """score; or what else a server serves, whose settings are those of a reward with a function."""


def load_reward(
    config_path: Path,
    function_path: Path | None = None,
    images: str = "",
    serves: str = SCORE,
    framework: str = "",
) -> ServedReward:
    """Read the Reward at `config_path` and its source, or the source at `function_path`; `images` enter the version.

    `framework`: of the environment, if that is what episodes are of.
    """
    reward = _read_reward(config_path, serves)
    scorer = reward.user_model if isinstance(reward, UserModelService) else reward.judge or reward.model
    if serves != SCORE and reward.function is None and not isinstance(reward, UserModelService):
        raise UserError(f"{config_path}: {reward.name} must have a function, which --serves {serves} calls")
    if scorer is not None:
        backend: Backend = scorer
        settings = _read_scorer(scorer) | {"scope": reward.scope}
    elif reward.function is not None:
        backend = _build_settings(reward.function, reward.scope, config_path, function_path, serves)
        if serves == EPISODES:
            backend = _open_to_the_model(backend)._replace(framework=framework)
        # A function does not change when its files move.
        settings = {name: value for name, value in backend._asdict().items() if name not in SCORE_NEUTRAL_FIELDS}
        if serves == SCORE:  # scores stay comparable with those of servers without the field
            del settings["serves"], settings["framework"]
    else:
        raise UserError(f"{config_path}: reward {reward.name} must have a function, model or judge")
    settings |= {"timeout_seconds": reward.timeout_seconds, "images": images}
    version = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return ServedReward(reward, backend, version, serves)


def _build_settings(
    function: FunctionReward, scope: Scope, config_path: Path, function_path: Path | None, serves: str
) -> FunctionSettings:
    module = function.module if function_path is None else None
    path, source = (module, "") if module else _read_source(function, config_path, function_path)
    fields = function.model_dump(include=set(FunctionSettings._fields))
    derived = {"source": source, "path": path, "module": module, "requirements": tuple(function.requirements)}
    return FunctionSettings(**fields | derived, scope=scope, serves=serves)


def _open_to_the_model(settings: FunctionSettings) -> FunctionSettings:
    """Let an episode reach the model's gateway. Only the network policy of its Pod says what else it reaches."""
    folder = (settings.factory_args or {}).get("working_dir") if settings.module == COMMAND_MODULE else None
    return settings._replace(network=True, folders=(folder,) if folder else ())


def _read_reward(path: Path, serves: str) -> Reward:
    try:
        data = yaml.safe_load(path.read_text())
        kind = UserModelService if serves == USER and isinstance(data, dict) and "userModel" in data else Reward
        return kind.model_validate(drop_unknown_fields(kind, data, str(path)))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; pass the path of one Reward as YAML to --config") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc'])) or 'reward'}: {e['msg']}" for e in error.errors())
        raise UserError(f"{path}: {'; '.join(problems)}") from error


def _read_source(function: FunctionReward, config_path: Path, override: Path | None) -> tuple[str, str]:
    """Return path and text: of the override, an absolute function.file, function.py next to the config, or inline."""
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
        raise UserError(f"{path}: the reward's source is not valid UTF-8: {error}") from error


def _read_scorer(scorer: JudgeReward | ModelReward | UserModel) -> dict[str, Any]:
    """Return what decides a score or a reply: template, model, parser. Not where and how fast the model runs."""
    parts = scorer.model_dump(mode="json", exclude={"endpoint": {"limits", "api_key_secret_ref"}})
    for model in (parts, parts.get("model") or {}):
        for name in _SCORE_NEUTRAL_FIELDS:
            model.pop(name, None)
    return parts
