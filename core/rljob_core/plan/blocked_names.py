"""Names of children that cannot be applied yet, since other objects have them: what is waited for, and who deletes it.

    a child of this object, or of an earlier one of its name --> the garbage collector, or the operator
    without such an owner                                    --> the user: the message has the command

The last are left by `kubectl delete --cascade=orphan`, or come from a backup. They may run Pods, and be in use,
so the operator never deletes them. Pure.
"""

from collections.abc import Sequence

from rljob_api.manifest.job import RLJob
from rljob_api.phrases import list_some
from rljob_api.wire.contract import LABEL_JOB, LABEL_REWARD_MODEL
from rljob_core.backend import ChildKey, Manifest, ObservedState, Owner
from rljob_core.plan.observed_job import find_stale, is_owned, is_terminating

_MAX_NAMED = 4


def describe_blocked(owner: Owner, state: ObservedState, blocked: Sequence[ChildKey]) -> str:
    """Return what a plan waits for, with the command for what is deleted by hand alone."""
    stale = find_stale(owner, state)
    left = [key for key in blocked if key not in stale and _is_left(owner, state.children.get(key))]
    waiting = f"waits until an earlier {_list_names(blocked)} is deleted"
    if not left:
        return waiting
    kinds = ",".join(sorted({key.kind.lower() for key in left}))
    label = LABEL_JOB if isinstance(owner, RLJob) else LABEL_REWARD_MODEL
    command = f"kubectl delete {kinds} -n {owner.metadata.namespace} -l {label}={owner.metadata.name}"
    return f"{waiting}; nothing deletes {_list_names(left)}, since this {owner.kind} is not the owner: {command}"


def _is_left(owner: Owner, child: Manifest | None) -> bool:
    return child is not None and not is_owned(owner, child) and not is_terminating(child)


def _list_names(keys: Sequence[ChildKey]) -> str:
    return list_some([f"{kind} {name}" for kind, name in keys], _MAX_NAMED)
