"""Objects that an operator with a different version wrote, as far as this version can read them. Pure.

Of a status, a value that this version cannot read is left out alone. A spec is read only as a whole, since what follows
from a part of it would be wrong; but fields that this version does not know are left out, and named.
"""

from copy import deepcopy
from typing import Any

from pydantic import ValidationError

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.manifest.status import RLJobStatus
from rljob_core.backend import Manifest


def parse_status(manifest: Manifest) -> RLJobStatus:
    """Return all of the status that this version can read."""
    status = deepcopy(manifest.get("status") or {})
    while True:
        try:
            return RLJobStatus.model_validate(status, extra="ignore")
        except ValidationError as error:
            _remove(status, error.errors()[-1]["loc"])


def parse_job(manifest: Manifest) -> RLJob | None:
    """Return the job; None if a value of its spec is not one of this version. It has no status."""
    try:
        return RLJob.model_validate(_without_status(manifest), extra="ignore")
    except ValidationError:
        return None


def find_unknown_fields(manifest: Manifest) -> list[str]:
    """Return the fields of the spec that this version does not know, such as `spec.rollout.new`."""
    try:
        RLJob.model_validate(_without_status(manifest))
    except ValidationError as error:
        unknown = [each for each in error.errors() if each["type"] == "extra_forbidden"]
        return [".".join(map(str, each["loc"])) for each in unknown]
    return []


def parse_reward_models(manifests: list[Manifest]) -> dict[str, RewardModel]:
    models = {}
    for manifest in manifests:
        try:
            models[manifest["metadata"]["name"]] = RewardModel.model_validate(manifest, extra="ignore")
        except ValidationError:
            continue
    return models


def _without_status(manifest: Manifest) -> Manifest:
    return {name: value for name, value in manifest.items() if name != "status"}


def _remove(data: dict[str, Any], location: tuple[int | str, ...]) -> None:
    """Remove the innermost value of `location` that exists: that of a missing field is the object that lacks it."""
    holder: Any = data
    found: tuple[Any, Any] | None = None
    for part in location:
        has_part = part in holder if isinstance(holder, dict) else isinstance(holder, list) and isinstance(part, int)
        if not has_part:
            break
        found, holder = (holder, part), holder[part]
    assert found is not None, f"all fields of a status have defaults, got an error at {location}"
    del found[0][found[1]]
