"""What an error answer of the API server means: refused for good, forbidden for now, or worth a retry. Pure.

`translate` goes from code, causes and message to the operator's errors, by the answers of Kubernetes 1.35. Invariant:
an unknown answer is transient. It is in the status after some retries, so that no answer leaves a job without a status.
"""

from collections.abc import Iterator
from decimal import Decimal
from http import HTTPStatus

from rljob_api import foreign_texts
from rljob_api.errors import TransientError
from rljob_api.quantity import parse_quantity
from rljob_core.backend import FieldProblem, ForbiddenError, RefusedError, UnansweredError
from rljob_core.kube.client import ApiError

_REFUSED_CODES = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
)
_UID = "metadata.uid"
_OF_SANDBOXES = ("serviceaccounts", "roles", "rolebindings", "sandboxtemplates", "sandboxwarmpools")


def translate(error: ApiError, verb: str, resource: str, where: str) -> Exception:
    """Return the operator's error for an answer to `verb` on `resource`. `where` names the object."""
    message = error.message
    if foreign_texts.NAMESPACE_ENDS.search(message):
        return TransientError(f"{where}: its namespace is being deleted")
    if is_quota_exceeded(error):
        return ForbiddenError(
            f"{where}: the namespace's quota is exceeded; raise its ResourceQuota, or delete what it counts ({message})"
        )
    if is_missing_right(error):
        return ForbiddenError(
            f"{where}: RBAC does not allow the operator to {verb} {resource}; {_find_grant(verb, resource)} ({message})"
        )
    if error.code == HTTPStatus.FORBIDDEN or foreign_texts.DENIED.search(message):
        return ForbiddenError(f"{where}: an admission policy rejects it; change the policy, or the spec ({message})")
    if foreign_texts.SILENT_WEBHOOK.search(message):
        return UnansweredError(f"{where}: an admission webhook does not answer; repair or remove it ({message})")
    if is_conflict(error):
        return TransientError(f"{where}: HTTP {error.code}: {message}")
    if (
        error.code in _REFUSED_CODES
        or foreign_texts.TYPED_PATCH.match(message)
        or foreign_texts.TOO_LARGE.search(message)
    ):
        return RefusedError(_without_prefix(message), tuple(find_field_problems(error)))
    if error.code == HTTPStatus.NOT_FOUND:
        return TransientError(f"{where}: not found (its namespace or kind may have been deleted): {message}")
    is_late = error.code == HTTPStatus.GATEWAY_TIMEOUT  # admission took all of the request's time
    return (UnansweredError if is_late else TransientError)(f"{where}: HTTP {error.code}: {message}")


def _find_grant(verb: str, resource: str) -> str:
    """What grants the right: a value of the chart, for features that are off by default."""
    if resource in _OF_SANDBOXES:
        return "in the chart's values, set features.agentSandbox"
    if (verb, resource) == ("patch", "pods"):
        return "in the chart's values, set features.schedulingGates"
    return "grant that verb to its service account"


def is_conflict(error: ApiError) -> bool:
    """Whether the object has changed, or another one has its name, since it was read."""
    return error.code == HTTPStatus.CONFLICT or any(cause.get("field") == _UID for cause in error.causes)


def is_quota_exceeded(error: ApiError) -> bool:
    return bool(foreign_texts.QUOTA.search(error.message))


def is_quota_for_good(error: ApiError) -> bool:
    """Whether the quota cannot admit the Pod however little is in use: it is above the hard limit, or leaves out a
    resource that the quota counts."""
    if match := foreign_texts.EXCEEDED_QUOTA.search(error.message):
        requested, limited = (_read_quantities(match[part]) for part in ("requested", "limited"))
        return any(number > limited[name] for name, number in requested.items() if name in limited)
    quota = foreign_texts.QUOTA.search(error.message)
    return quota is not None and quota["unspecified"] is not None


def _read_quantities(text: str) -> dict[str, Decimal]:
    """Read `pods=1,requests.cpu=500m`."""
    pairs = (part.strip().partition("=") for part in text.split(","))
    found = ((name, parse_quantity(value)) for name, _, value in pairs)
    return {name: number for name, number in found if number is not None}


def is_missing_right(error: ApiError) -> bool:
    """Whether RBAC forbids the request to the operator, whatever it contains."""
    return error.code == HTTPStatus.FORBIDDEN and bool(foreign_texts.MISSING_RIGHT.search(error.message))


def is_dry_run_unsupported(error: ApiError) -> bool:
    """Whether a webhook with side effects matches, so that nothing can be known without the real request."""
    return error.code == HTTPStatus.BAD_REQUEST and bool(foreign_texts.NO_DRY_RUN.search(error.message))


def find_field_problems(error: ApiError) -> Iterator[FieldProblem]:
    """Yield the fields that the answer names, each once, in the API server's own path syntax."""
    found = ((str(cause["field"]), str(cause.get("message", ""))) for cause in error.causes if cause.get("field"))
    yield from dict.fromkeys(FieldProblem(path, problem) for path, problem in found)


def _without_prefix(message: str) -> str:
    """The message without the internals of an apply."""
    typed = foreign_texts.TYPED_PATCH.match(message)
    return typed["problem"].strip() if typed else message
