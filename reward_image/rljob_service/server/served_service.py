"""The service that this server hosts: its settings, its source, and the digest of everything that decides a result.

Reads files; never runs user code. Errors are UserErrors that name the path.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.function import PythonFunction
from rljob_api.manifest.services.reward import FunctionReward, Reward
from rljob_api.read.unknown_fields import drop_unknown_fields
from rljob_api.wire.contract import FILE_FUNCTION
from rljob_service.kinds import KINDS, Kind, Model, describe_errors
from rljob_service.worker.settings import SCORE, SCORE_NEUTRAL_FIELDS, FunctionSettings

_NEUTRAL_FIELDS_OF_MODEL = (
    "placement",
    "gpus_per_replica",
    "max_batched_tokens",
    "kv_cache_memory",
    "gpu_memory_utilization",
    "image",
    "resources",
)


class ServedService(NamedTuple):
    """One service, ready to be started."""

    kind: Kind[Any]
    config: Reward | CallService
    """Settings of the type that its kind reads."""
    backend: FunctionSettings | Model
    """What its pool needs; for a function, the settings of a worker."""
    version: str
    """sha256 of source, settings and images: results of different versions are not comparable."""


def load_service(
    config_path: Path,
    function_path: Path | None = None,
    images: str = "",
    serves: str = SCORE,
    framework: str = "",
) -> ServedService:
    """Read the settings at `config_path` and their source, or the source at `function_path`; `images` enter the
    version.

    `serves`: a key of KINDS. `framework`: of the environment, if that is what episodes are of.
    """
    kind = KINDS[serves]
    config = _read_settings(config_path, kind)
    backend: FunctionSettings | Model
    if (model := kind.find_model(config)) is not None:
        backend = model
        decisive = _read_model(model)
    elif config.function is not None:
        function = _build_function_settings(config.function, config_path, function_path, serves)
        backend = kind.complete(function, config, framework)
        # A function does not change when its files move.
        neutral = (*SCORE_NEUTRAL_FIELDS, *kind.version_neutral)
        decisive = {name: value for name, value in backend._asdict().items() if name not in neutral}
    else:
        raise UserError(f"{config_path}: {kind.describe_missing(config)}")
    decisive |= {"timeout_seconds": config.timeout_seconds, "images": images}
    version = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
    return ServedService(kind, config, backend, version)


def _read_settings(path: Path, kind: Kind[Any]) -> Reward | CallService:
    wanted: type[Reward | CallService] = kind.settings_type
    try:
        data = yaml.safe_load(path.read_text())
        return wanted.model_validate(drop_unknown_fields(wanted, data, str(path)))
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; pass the path of one {wanted.__name__} as YAML to --config"
        ) from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise UserError(f"{path}: {describe_errors(error, 'settings')}") from error


def _build_function_settings(
    function: PythonFunction, config_path: Path, function_path: Path | None, serves: str
) -> FunctionSettings:
    module = function.module if function_path is None else None
    path, source = (module, "") if module else _read_source(function, config_path, function_path)
    fields = {"signature": "auto"} | function.model_dump(include=set(FunctionSettings._fields))
    sizes = {"max_memory_bytes": function.max_memory.num_bytes, "max_file_bytes": function.max_file_size.num_bytes}
    derived = {**sizes, "source": source, "path": path, "module": module, "requirements": tuple(function.requirements)}
    if isinstance(function, FunctionReward) and function.entrypoints:
        derived["entrypoint"] = ", ".join(function.entrypoints)
    return FunctionSettings(**fields | derived, serves=serves)


def _read_source(function: PythonFunction, config_path: Path, override: Path | None) -> tuple[str, str]:
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
        raise UserError(f"{path}: the source cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the source is not valid UTF-8: {error}") from error


def _read_model(model: Model) -> dict[str, Any]:
    """Return what decides a score or a reply: template, model, parser. Not where and how fast the model runs."""
    parts = model.model_dump(mode="json", exclude={"endpoint": {"limits", "api_key_secret_ref"}})
    for served in (parts, parts.get("model") or {}):
        for name in _NEUTRAL_FIELDS_OF_MODEL:
            served.pop(name, None)
    return parts
