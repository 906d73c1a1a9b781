"""explain: why a job is as it is, and what to do about it, from one look. Pure.

The causes and their remedies are the operator's own, found anew in what is there now, so that they hold as well when
the operator does not run.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.status import RLJobStatus
from rljob_cli.cluster.formatting import (
    command,
    deciding_condition,
    describe_pod,
    describe_wait,
    format_age,
    name_job,
    restarts_of,
    role_of,
)
from rljob_cli.cluster.observation import Look, about, name_claims, parse_time, said_at
from rljob_operator.backend import Manifest
from rljob_operator.children.network import OPERATOR_LABELS
from rljob_operator.plan import conditions
from rljob_operator.plan.causes import Cause, find_causes
from rljob_operator.plan.lifecycle import MANAGED_BY_US
from rljob_operator.plan.observed_job import last_termination, name_of, observe_world

_MAX_PODS_NAMED = 5
_MAX_WARNINGS = 8
_WIDTH = 110
_FINE = ("Ready", "Succeeded")
_OPERATOR_SELECTOR = ",".join(f"{key}={value}" for key, value in OPERATOR_LABELS.items())
_OPERATOR_PODS = f"kubectl get pods -A -l {_OPERATOR_SELECTOR}"
_FINISHED = ("Succeeded", "Failed")
_MAX_COMMANDS = 4
_AFTER_FAILURE = {
    "UserError": "mend what the message names (a changed spec starts the job again by itself), then retry",
    "HeadFailed": "see the head's log, then retry",
    "BackoffLimitExceeded": "see the role's log; raise its backoffLimit if the failures were the cluster's, then retry",
    "DeadlineExceeded": "raise spec.activeDeadlineSeconds, then retry",
    conditions.REASON_INVALID_SPEC: "change the spec: that alone undoes it, and needs no retry",
}
"""By the reason of the condition Failed."""


@dataclass(frozen=True)
class PodTrouble:
    name: str
    why: str
    restarts: int


@dataclass(frozen=True)
class RoleWords:
    name: str
    ready: int
    desired: int
    restarts: int
    troubles: list[PodTrouble]


@dataclass(frozen=True)
class Warn:
    """A Warning Event."""

    at: str
    about: str
    reason: str
    message: str
    count: int


@dataclass(frozen=True)
class Explanation:
    """All that explain says."""

    job: str
    phase: str
    since: str
    why: str
    """What it waits for, or how it ended; empty when nothing stands in its way."""
    progress: str
    conditions: list[tuple[str, str]]
    """What else holds that matters: 'NameConflict (ForeignObject)' and its message."""
    roles: list[RoleWords]
    remedies: list[str]
    warnings: list[Warn]
    next: list[str]
    """Commands to type."""
    unseen: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["conditions"] = [{"name": name, "message": message} for name, message in self.conditions]
        return data


def explain(look: Look) -> Explanation:
    status, job = look.status, look.parse()
    causes = _find_causes(look, job, status)
    why, others = _why(look, status), _other_conditions(status)
    for cause in causes:  # told under remedies
        why = why.replace(f"; {cause.words}", "")
    said = deciding_condition(status)
    return Explanation(
        job=name_job(look.manifest),
        phase=status.phase or "not looked at yet",
        since=said.last_transition_time.isoformat() if said and status.phase else "",
        why=why,
        progress=_describe_progress(status),
        conditions=others,
        roles=list(_describe_roles(look, status, job)),
        remedies=[*_after_failure(look, status), *_describe_remedies(look, causes)],
        warnings=_newest_warnings(look),
        next=_next_commands(look, status, causes),
        unseen=look.unseen if job else [*look.unseen, "the job's spec: it is not of this rljob's version"],
    )


def _find_causes(look: Look, job: RLJob | None, status: RLJobStatus) -> list[Cause]:
    if job is None or status.phase in (*_FINISHED, "Suspended"):
        return []
    observed = look.as_observed()
    found = find_causes(job, observe_world(job, observed), observed)
    # One that could not be listed, or is not of this rljob's version, may well be there.
    cannot_know = any("list rewardmodels" in words for words in look.unseen) or (
        len(look.reward_models) > len(observed.reward_models)
    )
    return [cause for cause in found if not (cannot_know and cause.reason == "RewardModelMissing")]


def is_unattended(look: Look, status: RLJobStatus) -> bool:
    """Whether the operator has not looked at the spec as it is."""
    manager = look.manifest["spec"].get("managedBy")
    return manager in (None, MANAGED_BY_US) and (
        status.observed_generation < int(look.manifest["metadata"].get("generation", 1))
    )


def _why(look: Look, status: RLJobStatus) -> str:
    manager = look.manifest["spec"].get("managedBy")
    if manager not in (None, MANAGED_BY_US):
        return f"spec.managedBy is {manager}: that controller acts on the job, not RLJob's operator"
    if is_unattended(look, status):
        seen = f"has seen generation {status.observed_generation} of" if status.observed_generation else "has not seen"
        generation = look.manifest["metadata"].get("generation", 1)
        waiting = f"the operator {seen} this job (its spec is at {generation}): it is behind, or does not run"
        return "; ".join(filter(None, [waiting, describe_wait(status)]))
    if status.phase == "Suspended":
        return "spec.suspend is true: its Pods are gone, its checkpoints stay"
    return describe_wait(status)


def _other_conditions(status: RLJobStatus) -> list[tuple[str, str]]:
    """Those that are told beside the one that decides the phase."""
    said = deciding_condition(status)
    matter = []
    for condition in status.conditions:
        bad = condition.status == "True" and condition.type in (conditions.NAME_CONFLICT, conditions.RESTARTING)
        bad |= condition.status == "False" and condition.type == conditions.POOLS_ISOLATED
        still_runs = condition.type == conditions.RUNNING and condition.status == "True" and status.phase == "Failed"
        if (bad or still_runs) and condition is not said:
            state = "" if condition.status == "True" else " is false"
            matter.append((f"{condition.type}{state} ({condition.reason})", condition.message))
    return matter


def _describe_progress(status: RLJobStatus) -> str:
    progress = status.progress
    if not progress.total_steps:
        return ""
    words = [f"step {progress.step}/{progress.total_steps}"]
    if progress.reward is not None:
        words.append(f"reward {progress.reward:.3f}")
    if progress.weight_version:
        words.append(f"weights v{progress.weight_version}")
    if progress.phase:
        words.append(f"the driver's phase is {progress.phase}")
    return ", ".join(words)


def _describe_roles(look: Look, status: RLJobStatus, job: RLJob | None) -> Iterator[RoleWords]:
    """As the Pods are now; wanted as the spec says, or of an ended or unreadable job as the status does."""
    told = {role.name: role for role in status.roles}
    is_wanted = job is not None and status.phase not in (*_FINISHED, "Suspended")
    wanted = {r.name: r.desired for r in observe_world(job, look.as_observed()).roles} if job and is_wanted else {}
    for name in wanted or told:
        pods = sorted((pod for pod in look.pods if role_of(pod) == name), key=name_of)
        words = {name_of(pod): describe_pod(pod) for pod in pods}
        desired = wanted.get(name, told[name].desired if name in told else 0)
        troubles = [PodTrouble(name_of(p), _trouble(p), restarts_of(p)) for p in pods if _trouble(p)]
        ready = min(desired, sum(word == "Ready" for word in words.values()))
        restarts = told[name].restarts if name in told else 0
        if is_wanted and desired > len(pods):
            troubles.append(PodTrouble("", f"{desired - len(pods)} not created yet", 0))
        yield RoleWords(name, ready, desired, restarts, troubles)


def _trouble(pod: Manifest) -> str:
    """What is wrong with a Pod now, or how it failed before it came back; empty when nothing is."""
    words = describe_pod(pod)
    if words not in _FINE:
        return words
    ended = last_termination(pod)
    return f"ready again; before, it ended with exit code {ended['exitCode']}" if ended and words == "Ready" else ""


def _after_failure(look: Look, status: RLJobStatus) -> list[str]:
    failed = conditions.find(status, conditions.FAILED)
    if status.phase != "Failed" or failed is None:
        return []
    words = _AFTER_FAILURE.get(failed.reason, "")
    if not words or failed.reason == conditions.REASON_INVALID_SPEC:
        return [words] if words else []
    is_kept = (look.manifest["spec"].get("checkpoint") or {}).get("persistentVolumeClaim")
    begins = "it goes on from its last checkpoint" if is_kept else "without spec.checkpoint.persistentVolumeClaim"
    return [f"{words}: {begins}" if is_kept else f"{words}; {begins} it begins at step 0"]


def _describe_remedies(look: Look, causes: list[Cause]) -> list[str]:
    words = [cause.words for cause in causes]
    for claim, phase in _unbound_claims(look).items():
        if phase is None:
            words.append(f"PersistentVolumeClaim {claim} does not exist; create it in the job's namespace")
        else:
            words.append(
                f"PersistentVolumeClaim {claim} is {phase}, not Bound; see its events, its storage class and "
                "whether a PersistentVolume fits"
            )
    return words


def _unbound_claims(look: Look) -> dict[str, str | None]:
    """Claims that the job names and that cannot be mounted: their phases, None where there is none."""
    if look.claims is None:
        return {}
    there = {name_of(claim): str((claim.get("status") or {}).get("phase", "Pending")) for claim in look.claims}
    return {claim: there.get(claim) for claim in name_claims(look.manifest) if there.get(claim) != "Bound"}


def _see_claims(look: Look) -> str:
    """Describe one that is there, for its events; else list those that are."""
    namespace = look.manifest["metadata"]["namespace"]
    pending = [claim for claim, phase in _unbound_claims(look).items() if phase]
    return f"kubectl describe pvc {' '.join(pending)} -n {namespace}" if pending else f"kubectl get pvc -n {namespace}"


def _newest_warnings(look: Look) -> list[Warn]:
    """Newest first, equal ones once."""
    found: dict[tuple[str, str, str], Warn] = {}
    for event in look.warnings:
        kind, name = about(event)
        key = (f"{kind} {name}", str(event.get("reason")), str(event.get("message")))
        count = int((event.get("series") or {}).get("count") or event.get("count") or 1)
        found.setdefault(key, Warn(said_at(event), *key, count))
    return list(found.values())[:_MAX_WARNINGS]


def _next_commands(look: Look, status: RLJobStatus, causes: list[Cause]) -> list[str]:
    job = look.manifest
    namespace = job["metadata"]["namespace"]
    edit = f"kubectl edit rljob {job['metadata']['name']} -n {namespace}"
    if job["spec"].get("managedBy") not in (None, MANAGED_BY_US):
        return []
    if is_unattended(look, status):
        return [_OPERATOR_PODS]
    if status.phase == "Failed":
        failed = conditions.find(status, conditions.FAILED)
        reason = failed.reason if failed else ""
        if reason == conditions.REASON_INVALID_SPEC:
            return [edit]
        role = next((role_of(pod) for pod in look.pods if last_termination(pod)), "")
        logs = [command("logs", job, "--role", role)] if role else []
        return [*logs, *([edit] if reason in ("UserError", "DeadlineExceeded") else []), command("retry", job)]
    if status.phase == "Succeeded":
        return [command("logs", job, "--role head", "--tail 20")] if look.pods else []
    if status.phase == "Suspended":
        return [command("resume", job)]
    if conditions.is_true(status, conditions.NAME_CONFLICT):
        conflict = conditions.find(status, conditions.NAME_CONFLICT)
        kind, _, name = (conflict.message if conflict else "").split(":")[0].split(",")[0].partition(" ")
        return [f"kubectl describe {kind.lower()} {name} -n {namespace}"]
    commands = [_command_of(cause, look, edit) for cause in causes]
    if _unbound_claims(look):
        commands.append(_see_claims(look))
    for pod in look.pods:
        if last_termination(pod) and describe_pod(pod) != "Ready":
            again = ["--previous"] if restarts_of(pod) else []
            commands.append(command("logs", job, "--role", role_of(pod), *again))
    return list(dict.fromkeys(filter(None, commands)))[:_MAX_COMMANDS] or [command("top", job, "--watch")]


def _command_of(cause: Cause, look: Look, edit: str) -> str:
    namespace = look.manifest["metadata"]["namespace"]
    return {
        "Unschedulable": "kubectl get nodes --show-labels",
        "VolumeUnbound": _see_claims(look),
        "QuotaExceeded": f"kubectl describe resourcequota -n {namespace}",
        "QuotaUnspecified": edit,
        "RewardModelNotReady": f"kubectl describe rewardmodels -n {namespace}",
        "RewardModelMissing": f"kubectl get rewardmodels -n {namespace}",
        "ImagePull": edit,
        "OOMKilled": edit,
        "CreateContainerConfigError": f"kubectl get configmaps,secrets -n {namespace}",
        "FailedMount": f"kubectl get configmaps,secrets,pvc -n {namespace}",
        "PodNameTaken": f"kubectl get pods -n {namespace} --show-labels",
        "FailedCreate": f"kubectl get events -n {namespace} --field-selector reason=FailedCreate",
    }.get(cause.reason, "")


def format_explanation(found: Explanation, now: datetime) -> str:
    """The same for people."""
    since = parse_time(found.since)
    lines = [f"{found.job}: {found.phase}" + (f" for {format_age(since, now)}" if since else "")]
    lines += [f"  {found.progress}"] if found.progress else []
    lines += _wrap("  ", found.why)
    for name, message in found.conditions:
        lines += _wrap("  ", f"{name}: {message}")
    if found.roles:
        lines += ["", "Roles"]
        width = max(len(role.name) for role in found.roles)
        for role in found.roles:
            restarts = f"   {role.restarts} restarts" if role.restarts else ""
            lines.append(f"  {role.name.ljust(width)}   {role.ready}/{role.desired} ready{restarts}")
            for trouble in role.troubles[:_MAX_PODS_NAMED]:
                lines += _wrap("    ", ": ".join(filter(None, [trouble.name, trouble.why])))
            if len(role.troubles) > _MAX_PODS_NAMED:
                lines.append(f"    and {len(role.troubles) - _MAX_PODS_NAMED} more")
    if found.remedies:
        lines += ["", "What to do"]
        for remedy in found.remedies:
            lines += _wrap("  - ", remedy)
    if found.warnings:
        lines += ["", "Newest warnings"]
        for warn in found.warnings:
            times = f" (x{warn.count})" if warn.count > 1 else ""
            age = format_age(parse_time(warn.at), now)
            lines += _wrap("  ", f"{age:>4}  {warn.about}  {warn.reason}{times}: {warn.message}", more=8)
    if found.unseen:
        lines += ["", "Not seen"]
        for words in found.unseen:
            lines += _wrap("  - ", words)
    if found.next:
        lines += ["", "Next", *(f"  {line}" for line in found.next)]
    return "\n".join(lines)


def _wrap(prefix: str, text: str, more: int | None = None) -> list[str]:
    """Lines of at most _WIDTH, later ones indented as the first or by `more`."""
    indent = " " * (len(prefix) if more is None else more)
    wrapped = []
    for index, line in enumerate(text.splitlines()):
        first = prefix if index == 0 else indent
        wrapped += textwrap.wrap(line, _WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False)
    return wrapped
