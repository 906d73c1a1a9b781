"""Why the API server admits no Pod of a role, and what to do: who rejects it, and for what reason. Pure.

Reads the messages of Kubernetes 1.35, of a dry run or of an Event. Invariant: an unknown message is repeated as it is.
"""

import re
from typing import NamedTuple

from rljob_api import foreign_texts


class _Form(NamedTuple):
    pattern: re.Pattern[str]
    """`who` rejects, or is missing; `why` is its own text."""
    text: str
    remedy: str = ""


_FORMS = (
    _Form(
        foreign_texts.POLICY,
        "ValidatingAdmissionPolicy {who} rejects its Pods: {why}",
        "change that policy, or {path}.template",
    ),
    _Form(
        foreign_texts.WEBHOOK,
        "admission webhook {who} rejects its Pods: {why}",
        "change its policy, or {path}.template",
    ),
    _Form(
        foreign_texts.POD_SECURITY,
        "PodSecurity {who} of the namespace rejects its Pods: {why}",
        "change {path}.template, or the namespace's label pod-security.kubernetes.io/enforce",
    ),
    _Form(
        foreign_texts.SERVICE_ACCOUNT,
        "its Pods need the service account {who}, which does not exist",
        "create it, or correct spec.serviceAccountName or {path}.template",
    ),
    _Form(
        foreign_texts.PRIORITY_CLASS,
        "its Pods need the PriorityClass {who}, which does not exist",
        "create it, or correct spec.priorityClassName or {path}.template",
    ),
    _Form(
        foreign_texts.RUNTIME_CLASS,
        "Pods need the RuntimeClass {who}, which does not exist",
        "create it, or correct spec.runtimeClassName or a role's template",
    ),
)
_OTHER = _Form(
    re.compile(r"(?P<who>)(?P<why>.*)", re.S),
    "the API server rejects its Pods: {why}",
)


def explain_rejection(message: str) -> tuple[str, str]:
    """Return what rejects the Pods of a role and why, and the remedy with {path}, that of the role in the manifest.
    An empty one is the usual one. One without {path} is the same for all roles."""
    reason = foreign_texts.REJECTED_POD.sub("", message, count=1).strip()
    matches = ((form, form.pattern.match(reason)) for form in (*_FORMS, _OTHER))
    form, found = next((form, found) for form, found in matches if found)
    why = found["why"] or "it gives no reason"
    return form.text.format(who=found["who"], why=why), form.remedy
