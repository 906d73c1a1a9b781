"""Stored manifests as the operator's types. Pure.

The API server drops fields that its CRDs lack, so a field that the types lack means: the CRDs are newer than the
operator. If it is in the spec, nothing is written for the object, since the operator cannot know what it asks for; in a
status, which a newer operator wrote, it is left out. Any other invalid object keeps its children and gets a status that
reports every problem. Invariant: of an invalid object only the metadata and, if it can
be read, the old status are used.
"""

import contextlib
from typing import Any, TypeVar

from pydantic import ValidationError

from rljob_api.manifest.base import ObjectMeta
from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.manifest.kept_defaults import fill_in, remember
from rljob_api.manifest.policy import RLJobPolicy
from rljob_api.manifest.services.reward import RewardModel, RewardModelStatus
from rljob_api.manifest.status import RLJobStatus
from rljob_api.read.documents import format_path
from rljob_api.read.validation_messages import describe_error
from rljob_core.backend import InvalidOwnerError, Manifest, Owner, UnknownFieldsError
from rljob_operator.kube.crds import MAX_LISTED_FIELDS, UPGRADE_OPERATOR

_Owner = TypeVar("_Owner", RLJob, RewardModel)
_UNKNOWN = "extra_forbidden"
_REMEDY = "the CRDs accept it; upgrade the operator to their version, or change the value"


def read_job(manifest: Manifest) -> RLJob:
    """Raises InvalidOwnerError and UnknownFieldsError."""
    return _read(RLJob, RLJobStatus, manifest)


def read_model(manifest: Manifest) -> RewardModel:
    """Raises InvalidOwnerError and UnknownFieldsError."""
    return _read(RewardModel, RewardModelStatus, manifest)


def read_policy(manifest: Manifest | None) -> tuple[RLJobPolicy | None, str]:
    """Return the policy of a namespace, and why it cannot be read, if it exists and cannot."""
    if manifest is None or manifest["metadata"].get("deletionTimestamp"):
        return None, ""
    metadata = manifest["metadata"]
    where = f"RLJobPolicy {metadata.get('namespace', '')}/{metadata['name']}"
    try:
        return RLJobPolicy.model_validate(manifest), ""
    except ValidationError as error:
        fields = ", ".join(format_path(detail["loc"]) for detail in error.errors(include_url=False))
        return None, f"{where} has fields that this operator cannot read: {fields}; {_REMEDY}"


def _read(type_: type[_Owner], status_type: type[RLJobStatus | RewardModelStatus], manifest: Manifest) -> _Owner:
    kept = (manifest.get("status") or {}).get("defaults")
    try:
        if not kept:
            return _validate(type_, manifest)
        owner = _validate(type_, manifest | {"spec": fill_in(RLJobSpec, manifest["spec"], kept)})
        remember(owner.spec, kept)
        return owner
    except ValidationError as error:
        raise _translate(_build_unread(type_, status_type, manifest), error) from None


def _validate(type_: type[_Owner], manifest: Manifest) -> _Owner:
    try:
        return type_.model_validate(manifest)
    except ValidationError as error:
        if any(each["loc"][:1] != ("status",) or each["type"] != _UNKNOWN for each in error.errors()):
            raise
        return type_.model_validate(manifest, extra="ignore")


def _build_unread(
    type_: type[_Owner], status_type: type[RLJobStatus | RewardModelStatus], manifest: Manifest
) -> _Owner:
    """The object without a spec."""
    status = status_type()
    with contextlib.suppress(ValidationError):
        status = status_type.model_validate(manifest.get("status") or {}, extra="ignore")
    fields: dict[str, Any] = {"metadata": ObjectMeta.model_validate(manifest["metadata"]), "status": status}
    return type_.model_construct(**fields)


def _translate(owner: Owner, error: ValidationError) -> InvalidOwnerError | UnknownFieldsError:
    details = error.errors(include_url=False)
    details = [detail for detail in details if detail["loc"][:1] != ("status",) or detail["type"] != _UNKNOWN]
    unknown = [format_path(detail["loc"]) for detail in details if detail["type"] == _UNKNOWN]
    if unknown:
        fields = ", ".join(unknown[:MAX_LISTED_FIELDS])
        return UnknownFieldsError(
            owner, f"the CRDs are newer than this operator, which does not know {fields}; {UPGRADE_OPERATOR}"
        )
    return InvalidOwnerError(owner, [f"{_describe(type(owner), detail)}; {_REMEDY}" for detail in details])


def _describe(model: type[Owner], detail: Any) -> str:
    if detail["type"] == "value_error":  # a rule of rljob_api
        text = str(detail["ctx"]["error"])
    else:
        text = describe_error(model, detail["type"], detail["loc"], detail["input"], detail.get("ctx", {}))
    return f"{format_path(detail['loc'])} {text}".strip()
