"""Apply the children of one owner in an order that leaves nothing half done.

First the accounts of Pods, and their roles. Then what Pods read or are protected by, and at the same time checks of the
workloads that are new or whose Pods change: the Secrets and ConfigMaps that they need, and dry runs if none is missing.
Then the workloads and the pools of sandboxes. Invariant: if anything is refused, none of these is created or changed.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from rljob_api.errors import TransientError, UserError
from rljob_core.backend import (
    Backend,
    ChildKey,
    ForbiddenError,
    Manifest,
    MissingReferencesError,
    Owner,
    PodRejectedError,
    key_of,
)
from rljob_core.children import SANDBOX_POOL, WORKLOAD_KINDS
from rljob_core.children.difference import contains
from rljob_core.loop.refusals import Call
from rljob_core.plan.causes import Cause
from rljob_core.plan.rejections import describe_pod_rejection, describe_refusal

MISSING_RETRY_SECONDS = 15.0
"""How soon to look again for a missing Secret or ConfigMap: its creation causes no event that the operator watches."""
_FIRST = ("ServiceAccount", "Role")
"""In this order. Dry runs of Pods need their account. The API server refuses a RoleBinding whose Role is missing."""


class ApplyFailure(NamedTuple):
    """A child that a retry does not help to apply: refused by the API server, or another owner's object."""

    child: ChildKey
    error: UserError
    problems: list[str]
    """In terms of the owner's manifest."""


async def apply_children(
    backend: Backend,
    owner: Owner,
    observed: Mapping[ChildKey, Manifest],
    changed: Collection[Manifest],
    replaced: Collection[Manifest] = (),
    guard: Callable[[Call], Call] = lambda call: call,
) -> list[ApplyFailure]:
    """Apply the changed children and return what was refused. `replaced` workloads are checked only: they are applied
    after the deletion of the existing ones. `guard` delays the retries of what was refused. Raises the first error that
    is worth a retry, if nothing was refused."""
    apply = guard(backend.apply)
    standing = [child for child in changed if child["kind"] not in (*_FIRST, SANDBOX_POOL, *WORKLOAD_KINDS)]
    workloads = [child for child in changed if child["kind"] in WORKLOAD_KINDS]
    pools = [child for child in changed if child["kind"] == SANDBOX_POOL]
    checked = [child for child in (*workloads, *replaced) if _needs_check(observed.get(key_of(child)), child)]
    for kind in _FIRST:
        applied = await _call_all(owner, apply, [child for child in changed if child["kind"] == kind])
        if not applied.is_ok:  # what refers to it would be refused, too
            return _read_failures(applied)
    applied, checks = await asyncio.gather(
        _call_all(owner, apply, standing), _check_all(owner, backend, guard(backend.check), checked)
    )
    if applied.is_ok:  # Pods must not start from another owner's Secret, or without their NetworkPolicy
        # Workloads that only change their replicas are applied although a change of others is refused.
        unchecked = [child for child in workloads if checks.is_ok or child not in checked]
        applied = await _call_all(owner, apply, [*(pools if checks.is_ok else []), *unchecked])
    return _read_failures(applied, checks)


def _needs_check(known: Manifest | None, workload: Manifest) -> bool:
    return known is None or not contains(known["spec"]["template"], workload["spec"]["template"])


class _Outcome(NamedTuple):
    failures: list[ApplyFailure]
    error: BaseException | None

    @property
    def is_ok(self) -> bool:
        return not self.failures and self.error is None


def _read_failures(*outcomes: _Outcome) -> list[ApplyFailure]:
    """Return the failures. Raises the first error if there are none."""
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    if not failures and (error := next((each.error for each in outcomes if each.error), None)):
        raise error
    return failures


async def _check_all(owner: Owner, backend: Backend, check: Call, workloads: Collection[Manifest]) -> _Outcome:
    """A job that waits for a Secret is checked again and again, so its dry runs wait, too."""
    try:
        missing = await backend.find_missing(list(workloads))
    except TransientError as error:
        return _Outcome([], error)
    if any(missing):
        return _judge(owner, workloads, [MissingReferencesError(each) if each else None for each in missing])
    return await _call_all(owner, check, workloads)


async def _call_all(owner: Owner, call: Call, children: Collection[Manifest]) -> _Outcome:
    return _judge(owner, children, await asyncio.gather(*map(call, children), return_exceptions=True))


def _judge(owner: Owner, children: Collection[Manifest], outcomes: Sequence[BaseException | None]) -> _Outcome:
    failures, rejected, errors = list[ApplyFailure](), list[Cause](), list[BaseException]()
    for child, outcome in zip(children, outcomes, strict=True):
        if isinstance(outcome, UserError):
            failures.append(ApplyFailure(key_of(child), outcome, describe_refusal(owner, child, outcome)))
        elif isinstance(outcome, PodRejectedError):
            rejected += describe_pod_rejection(owner, child["metadata"]["name"], outcome)
        elif outcome is not None:
            errors.append(outcome)
    if rejected:
        message = "; ".join(cause.message for cause in dict.fromkeys(rejected))
        is_missing = any(isinstance(outcome, MissingReferencesError) for outcome in outcomes)
        longest = MISSING_RETRY_SECONDS if is_missing else None
        errors.insert(0, ForbiddenError(message, rejected[0].reason, longest))
    return _Outcome(failures, errors[0] if errors else None)
