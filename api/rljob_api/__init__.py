"""The public API of RLJob: manifests, the reward protocol and errors.

Exports are loaded on first use (PEP 562): reward workers import `rljob_api.errors` without pydantic.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_api.wire.contract import API_GROUP, API_VERSION

if TYPE_CHECKING:
    from rljob_api.manifest.job import RLJob, RLJobSpec
    from rljob_api.manifest.services.reward import Reward, RewardModel, RewardModelSpec, RewardModelStatus
    from rljob_api.manifest.status import Condition, RLJobStatus
    from rljob_api.read.documents import Problem
    from rljob_api.read.load import InvalidManifestError, load_job, load_manifests
    from rljob_api.wire.base import InvalidReason
    from rljob_api.wire.driver_status import DriverStatus
    from rljob_api.wire.scores import GroupRequest, GroupResult, ScoreRequest, ScoreResult

__version__ = "0.2.0.dev0"

__all__ = [
    "API_GROUP",
    "API_VERSION",
    "Condition",
    "DriverStatus",
    "GroupRequest",
    "GroupResult",
    "InvalidManifestError",
    "InvalidReason",
    "Problem",
    "RLJob",
    "RLJobError",
    "RLJobSpec",
    "RLJobStatus",
    "Reward",
    "RewardModel",
    "RewardModelSpec",
    "RewardModelStatus",
    "ScoreRequest",
    "ScoreResult",
    "TransientError",
    "UserError",
    "__version__",
    "load_job",
    "load_manifests",
]

_LAZY_MODULES = (
    "wire.base",
    "wire.scores",
    "wire.driver_status",
    "manifest.status",
    "manifest.services.reward",
    "manifest.job",
    "read.documents",
    "read.load",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        modules = (importlib.import_module(f"rljob_api.{module}") for module in _LAZY_MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
