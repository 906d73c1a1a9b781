"""What the operator makes of the answers of a real API server (Kubernetes 1.35)."""

import pytest

from rljob_api.errors import TransientError
from rljob_core.backend import FieldProblem, ForbiddenError, RefusedError, UnansweredError
from rljob_core.kube.client import ApiError
from rljob_operator.kube import refusals

STATEFUL_SET = 'statefulsets.apps "gsm8k-trainer"'
TYPED = "failed to create typed patch object (x/gsm8k-trainer; apps/v1, Kind=StatefulSet): "
CONVERTED = (
    "failed to convert new object (x/gsm8k-trainer; apps/v1, Kind=StatefulSet) to proper version: unable to convert "
    "unstructured object to apps/v1, Kind=StatefulSet: "
)
TERMINATING = "unable to create new content in namespace term because it is being terminated"
DENIED_BY_POLICY = "ValidatingAdmissionPolicy 's' with binding 's' denied request: no statefulsets here"
WEBHOOK = 'Internal error occurred: failed calling webhook "w.example.com": failed to call webhook: Post "https://w":'
UID = {"reason": "FieldValueInvalid", "message": 'Invalid value: "xyz": field is immutable', "field": "metadata.uid"}
IMAGE = {"reason": "FieldValueRequired", "message": "Required value", "field": "spec.template.spec.containers[0].image"}

FORBIDDEN = ApiError(403, "Forbidden", 'x is forbidden: User "op" cannot do that')


@pytest.mark.parametrize(
    ("verb", "resource", "grant"),
    [
        ("patch", "pods", "features.schedulingGates"),
        ("patch", "serviceaccounts", "features.agentSandbox"),
        ("patch", "sandboxtemplates", "features.agentSandbox"),
        ("patch", "sandboxwarmpools", "features.agentSandbox"),
        ("patch", "secrets", "grant that verb"),
    ],
)
def test_missing_right_names_the_value_of_the_chart_that_grants_it(verb, resource, grant):
    assert grant in str(refusals.translate(FORBIDDEN, verb, resource, "x"))


ANSWERS = [
    # (code, message, causes, error, part of its message)
    (403, f"{STATEFUL_SET} is forbidden: {TERMINATING}", (), TransientError, "its namespace is being deleted"),
    (
        403,
        f"{STATEFUL_SET} is forbidden: exceeded quota: sts, requested: count/statefulsets.apps=1",
        (),
        ForbiddenError,
        "raise its ResourceQuota",
    ),
    (
        403,
        f'{STATEFUL_SET} is forbidden: User "op" cannot patch resource "statefulsets"',
        (),
        ForbiddenError,
        "RBAC does not allow the operator to patch statefulsets",
    ),
    (422, f"{STATEFUL_SET} is forbidden: {DENIED_BY_POLICY}", (), ForbiddenError, "an admission policy rejects it"),
    (403, f"{STATEFUL_SET} is forbidden: {DENIED_BY_POLICY}", (), ForbiddenError, "an admission policy rejects it"),
    (400, 'admission webhook "p" denied the request: no', (), ForbiddenError, "an admission policy rejects it"),
    (500, 'admission webhook "p" denied the request: no', (), ForbiddenError, "an admission policy rejects it"),
    (403, 'pods "p" is forbidden: violates PodSecurity "restricted:latest"', (), ForbiddenError, "change the policy"),
    (
        500,
        f"{WEBHOOK} dial tcp: connection refused",
        (),
        UnansweredError,
        "webhook does not answer; repair or remove it",
    ),
    (500, f"{WEBHOOK} context deadline exceeded", (), UnansweredError, "webhook does not answer"),
    (422, 'ConfigMap "cm" is invalid: metadata.uid: field is immutable', (UID,), TransientError, "HTTP 422"),
    (409, "the object has been modified; please apply your changes to the latest version", (), TransientError, "409"),
    (422, "StatefulSet.apps is invalid: image: Required value", (IMAGE,), RefusedError, "Required value"),
    (413, "Request entity too large: limit is 3145728", (), RefusedError, "limit is 3145728"),
    (400, "error decoding YAML: error converting YAML to JSON", (), RefusedError, "error decoding YAML"),
    (500, f"{TYPED}.spec.template.spec.nodeSelectr: field not declared in schema", (), RefusedError, "nodeSelectr"),
    (500, f"{CONVERTED}quantities must match the regular expression", (), RefusedError, "quantities must match"),
    (
        500,
        "rpc error: trying to send message larger than max (3002901 vs. 2097152)",
        (),
        RefusedError,
        "larger than max",
    ),
    (500, "etcdserver: request is too large", (), RefusedError, "too large"),
    (404, 'namespaces "nope" not found', (), TransientError, "not found"),
    (404, "404 page not found", (), TransientError, "its namespace or kind may have been deleted"),
    (401, "Unauthorized", (), TransientError, "HTTP 401"),
    (429, "too many requests", (), TransientError, "HTTP 429"),
    (500, "Internal error occurred: etcdserver: request timed out", (), TransientError, "HTTP 500"),
    (503, "the server is currently unable to handle the request", (), TransientError, "HTTP 503"),
    (504, "Timeout: request did not complete within requested timeout", (), UnansweredError, "HTTP 504"),
]


def answer(code, message, causes=()):
    return ApiError(code, "", message, causes)


@pytest.mark.parametrize(("code", "message", "causes", "kind", "part"), ANSWERS)
def test_answer_is_classified_with_its_remedy(code, message, causes, kind, part):
    error = refusals.translate(answer(code, message, causes), "patch", "statefulsets", "StatefulSet x/gsm8k-trainer")
    assert type(error) is kind
    assert part in str(error)


@pytest.mark.parametrize(
    ("message", "causes", "fields"),
    [
        ("is invalid", (IMAGE, IMAGE), [("spec.template.spec.containers[0].image", "Required value")]),
        (f"{TYPED}.spec.template.spec.nodeSelector: expected map, got &{{[a]}}", (), []),
        (f"{CONVERTED}cannot convert float64 to int64", (), []),
        (DENIED_BY_POLICY, ({"message": DENIED_BY_POLICY},), []),
    ],
)
def test_fields_of_an_answer_are_found(message, causes, fields):
    assert list(refusals.find_field_problems(answer(500, message, causes))) == [
        FieldProblem(*field) for field in fields
    ]


def test_message_of_a_refusal_has_no_internals_of_the_apply():
    error = refusals.translate(answer(500, f"{TYPED}.spec.a: expected map"), "patch", "statefulsets", "x")
    assert str(error) == ".spec.a: expected map"
    error = refusals.translate(answer(500, f"{CONVERTED}cannot convert float64"), "patch", "statefulsets", "x")
    assert str(error) == "cannot convert float64"


def test_webhook_without_dry_run_is_recognized():
    message = 'admission webhook "w" does not support dry run'
    assert refusals.is_dry_run_unsupported(answer(400, message))
    assert not refusals.is_dry_run_unsupported(answer(400, "error decoding YAML"))
