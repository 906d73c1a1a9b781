"""What an existing workload keeps over an upgrade of the operator: all that would replace its Pods, or is immutable.

Two digests on the workload itself decide: of the user's configuration (`configuration`), and of what the operator built
from it. If only the second differs, the operator has changed, and the workload keeps what it runs. If the configuration
differs, the current operator rebuilds the workload. Pure. Invariant: new images, defaults, commands or probes of the
operator never replace a Pod of an existing workload.
"""

from collections.abc import Mapping
from typing import Any

from rljob_core.backend import ChildKey, Manifest, Owner
from rljob_core.children.common import SANDBOX_TEMPLATE, digest

ANNOTATION_CONFIGURATION = "rljob.dev/configuration"
"""Digest of the user's configuration of the role."""
ANNOTATION_AT_START = "rljob.dev/configuration-at-start"
"""The same digest without what heads of 0.2 read again. Programs of earlier versions, which do not, lack it."""
ANNOTATION_READ_ONCE = "rljob.dev/configuration-read-once"
"""The same digest without all that the program reads again. What is compared is the last that a workload has, so that
a change replaces what would not notice it, and an upgrade nothing."""
ANNOTATION_SCHEDULING = "rljob.dev/scheduling"
"""Digest of the user's settings of the gang, which matter until the job runs."""
ANNOTATION_BUILT = "rljob.dev/built"
"""Digest of what is kept, as the operator built it."""
_AT_START = (ANNOTATION_READ_ONCE, ANNOTATION_AT_START)
_MUTABLE = {
    "Job": {"parallelism", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "suspend"},
    "StatefulSet": {"replicas", "updateStrategy", "minReadySeconds", "persistentVolumeClaimRetentionPolicy"},
    "Deployment": {"replicas", "strategy", "minReadySeconds", "progressDeadlineSeconds"},
    SANDBOX_TEMPLATE: set[str](),
}
"""Fields of a workload's spec that may change at any time without replacing Pods."""
KINDS = tuple(_MUTABLE)
"""What keeps what it runs."""
_Children = Mapping[ChildKey, Manifest]


def record_configuration(
    workload: Manifest, configuration: Manifest, scheduling: Manifest, parts: Mapping[str, Manifest]
) -> Manifest:
    """The built workload with the digests of what it was built from. `parts`: of the configuration, by annotation."""
    digests = {ANNOTATION_CONFIGURATION: digest(configuration), ANNOTATION_SCHEDULING: digest(scheduling)}
    digests |= {name: digest(part) for name, part in parts.items()}
    return _with_annotations(workload, digests)


def record_built(child: Manifest) -> Manifest:
    """The child with the digest of what it keeps, if it is a workload."""
    kept = kept_fields(child)
    return _with_annotations(child, {ANNOTATION_BUILT: digest(kept)}) if kept else child


def find_unchanged(built: _Children, existing: _Children, ignores_scheduling: bool = True) -> set[ChildKey]:
    """The existing workloads that were built from the user's configuration."""
    return {
        key
        for key in built.keys() & existing.keys()
        if key.kind in KINDS and _is_same(built[key], existing[key], ignores_scheduling)
    }


def _is_same(desired: Manifest, running: Manifest, ignores_scheduling: bool) -> bool:
    new, old = _annotations_of(desired), _annotations_of(running)
    names = [next((name for name in _AT_START if name in old), ANNOTATION_CONFIGURATION)]
    names += [] if ignores_scheduling else [ANNOTATION_SCHEDULING]
    return all(new.get(name) == old.get(name) for name in names)


def name_otherwise(owner: Owner) -> Any:
    """The owner of the same Pods, with Kubernetes' default service account named if it is not, and the reverse. None:
    it names another one."""
    if (account := owner.spec.service_account_name) in (None, "default"):
        other = {"service_account_name": None if account else "default"}
        return owner.model_copy(update={"spec": owner.spec.model_copy(update=other)})
    return None


def keep_running(desired: Manifest, running: Manifest) -> Manifest:
    """`desired` with all that `running` must keep, if the operator built it differently."""
    old_annotations = _annotations_of(running)
    kept = _with_annotations(desired, {name: old_annotations.get(name) for name in (ANNOTATION_BUILT, *_AT_START)})
    if not is_outdated(desired, running):
        return kept
    # The version is that which built the Pods. A new label would be a write of all workloads.
    old = running["metadata"].get("labels", {})
    labels = {name: old[name] for name in old if name in desired["metadata"]["labels"]}
    spec = {name: value for name, value in desired["spec"].items() if name in _MUTABLE[desired["kind"]]}
    return kept | {"metadata": kept["metadata"] | {"labels": labels}, "spec": spec | kept_fields(running)}


def is_outdated(desired: Manifest, running: Manifest) -> bool:
    """Whether the operator built `running` differently."""
    return _annotations_of(desired).get(ANNOTATION_BUILT) != _annotations_of(running).get(ANNOTATION_BUILT)


def must_recreate(desired: Manifest, running: Manifest) -> bool:
    """Whether `running` must be deleted before `desired` is applied. The template of a Job is immutable. A StatefulSet
    would replace the trainers one after the other, and each would end the training group."""
    return desired["kind"] in ("Job", "StatefulSet") and is_outdated(desired, running)


def kept_fields(workload: Manifest) -> Manifest:
    """The fields of the spec that are kept: the Pods, and what is immutable. Other objects have none."""
    spec: Manifest = workload.get("spec", {})
    return {name: value for name, value in spec.items() if name not in _MUTABLE.get(workload.get("kind", ""), spec)}


def _annotations_of(workload: Manifest) -> dict[str, str]:
    return workload["metadata"].get("annotations") or {}


def _with_annotations(workload: Manifest, changes: Mapping[str, str | None]) -> Manifest:
    """The workload with changed annotations; None removes one."""
    annotations = {**_annotations_of(workload), **changes}
    metadata = workload["metadata"] | {"annotations": {k: v for k, v in annotations.items() if v is not None}}
    return workload | {"metadata": metadata}
