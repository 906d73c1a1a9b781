"""Refusals of the API server, by the user's field."""

import pytest

from rljob_api.errors import UserError
from rljob_core.backend import FieldProblem, MissingReferencesError, PodRejectedError, Reference, RefusedError
from rljob_core.children import WORKLOAD_KINDS, build_children
from rljob_core.defaults import DEFAULTS
from rljob_core.plan.causes import REMEDIES
from rljob_core.plan.rejections import describe_pod_rejections, describe_refusal
from tests.support.job_simulation import make_job

TEMPLATE = {"spec": {"dnsPolicy": "X", "containers": [{"name": "own", "image": "i"}]}}
JOB = make_job(trainer={"template": TEMPLATE, "resources": {"limits": {"cpu": 1}}})
CHILDREN = {child["metadata"]["name"]: child for child in build_children(JOB, "token", DEFAULTS)}
TRAINER = CHILDREN["gsm8k-trainer"]


def refusal(*fields):
    return RefusedError("no", tuple(FieldProblem(*field) for field in fields))


@pytest.mark.parametrize(
    ("path", "origin"),
    [
        ("spec.template.spec.dnsPolicy", "spec.trainer.template.spec.dnsPolicy"),
        ("spec.template.spec.containers[1].image", "spec.trainer.template.spec.containers[0].image"),
        ("spec.template.spec.containers[0].resources.limits[cpu]", "spec.trainer.resources.limits.cpu"),
        (
            "spec.template.spec.volumes[0]",
            "spec.trainer.template: StatefulSet gsm8k-trainer: spec.template.spec.volumes[0]",
        ),
        ("spec.serviceName", "spec.trainer.template: StatefulSet gsm8k-trainer: spec.serviceName"),
    ],
)
def test_problem_begins_with_the_field_that_the_user_wrote(path, origin):
    assert describe_refusal(JOB, TRAINER, refusal((path, "wrong"))) == [f"{origin}: wrong"]


def test_every_field_is_one_problem():
    fields = [("spec.template.spec.dnsPolicy", "wrong"), ("spec.template.spec.containers[1].image", "missing")]
    assert len(describe_refusal(JOB, TRAINER, refusal(*fields))) == 2


@pytest.mark.parametrize("error", [refusal(), UserError("no")])
def test_answer_without_fields_names_the_template_of_every_role(error):
    paths = {}
    for child in CHILDREN.values():
        (problem,) = describe_refusal(JOB, child, error)
        assert problem.endswith(f"{child['kind']} {child['metadata']['name']} was refused: no")
        if child["kind"] in WORKLOAD_KINDS:
            paths[child["metadata"]["name"]] = problem.partition(":")[0]
        else:
            assert problem.startswith(child["kind"])
    assert paths == {
        "gsm8k-head": "spec.head.template",
        "gsm8k-trainer": "spec.trainer.template",
        "gsm8k-rollout": "spec.rollout.template",
        "gsm8k-reward-correct": "spec.rewards[0].template",
    }


def test_rejected_pod_has_the_role_and_the_remedy_and_no_generated_name():
    message = 'pods "gsm8k-trainer-x7f2k" is forbidden: violates PodSecurity "restricted:latest": privileged'
    (cause,) = describe_pod_rejections(JOB, {"gsm8k-trainer": PodRejectedError(message)})
    assert cause.reason == "FailedCreate"
    assert cause.message == (
        'trainer: the API server rejects its Pods: violates PodSecurity "restricted:latest": privileged; create '
        "what is missing, or change the policy that it names, or spec.trainer.template"
    )


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (
            PodRejectedError('Pod "x" is invalid: must be less than or equal to memory limit of 1Gi', "LimitRange"),
            "LimitRange",
            "trainer: the API server rejects its Pods: must be less than or equal to memory limit of 1Gi; set "
            "requests and limits in spec.trainer.resources, also those that RLJob sets by default, or change the "
            "namespace's LimitRange",
        ),
        (
            PodRejectedError('pods "x" is forbidden: exceeded quota: q, requested: cpu=9, used: cpu=0, limited: cpu=4'),
            "QuotaExceeded",
            "trainer: exceeds quota q with cpu=9; raise the namespace's ResourceQuota",
        ),
        (
            PodRejectedError('pods "x" is forbidden: failed quota: q: must specify limits.cpu'),
            "QuotaUnspecified",
            "trainer: quota q requires limits.cpu; set them in spec.trainer.resources",
        ),
    ],
)
def test_limit_range_and_quota_have_their_own_reason_and_remedy(error, reason, message):
    (cause,) = describe_pod_rejections(JOB, {"gsm8k-trainer": error})
    assert (cause.reason, cause.message[: len(message)]) == (reason, message)


def test_what_is_missing_for_several_roles_is_one_cause():
    text = 'pod rejected: RuntimeClass "zz" not found'
    errors = {f"gsm8k-{role}": f'pods "gsm8k-{role}-x7f2k" is forbidden: {text}' for role in ("head", "reward-correct")}
    (cause,) = describe_pod_rejections(JOB, {name: PodRejectedError(error) for name, error in errors.items()})
    assert cause.message.startswith(f"head, reward-correct: the API server rejects its Pods: {text}; create what is ")
    assert cause.message.endswith(" or spec.{head,rewards[0]}.template")


def test_reference_of_several_roles_is_one_cause_with_each_field():
    job = make_job(head={"template": READS}, trainer={"template": READS})
    error = MissingReferencesError((Reference("Secret", "key"),))
    causes = describe_pod_rejections(job, {"gsm8k-head": error, "gsm8k-trainer": error})
    place = "template.spec.containers[0].envFrom[0].secretRef.name"
    assert [cause.message for cause in dict.fromkeys(causes)] == [
        f"spec.head.{place}, spec.trainer.{place}: Secret key does not exist; {REMEDIES['ReferenceMissing']}"
    ]


READS = {"spec": {"containers": [{"name": "trainer", "envFrom": [{"secretRef": {"name": "key"}}]}]}}
SAME_KEY = [{"name": "A", "valueFrom": {"secretKeyRef": {"key": "key", "name": "key"}}}]
NOTED = {
    "metadata": {"annotations": {"example.org/secret": "key"}},
    "spec": {"containers": [{"name": "trainer", "env": SAME_KEY}]},
}


@pytest.mark.parametrize(
    ("spec", "missing", "path"),
    [
        (
            {"trainer": {"template": READS}},
            "Secret key",
            "spec.trainer.template.spec.containers[0].envFrom[0].secretRef.name",
        ),
        ({"hub": {"tokenSecretRef": {"name": "key", "key": "k"}}}, "Secret key", "spec.hub.tokenSecretRef.name"),
        (
            {"trainer": {"template": NOTED}},
            "Secret key",
            "spec.trainer.template.spec.containers[0].env[0].valueFrom.secretKeyRef.name",
        ),
        ({"head": {"env": {"A": "key"}}}, "Secret key", "spec.trainer.template"),
        (
            {"checkpoint": {"persistentVolumeClaim": {"claimName": "runs"}}},
            "PersistentVolumeClaim runs",
            "spec.checkpoint.persistentVolumeClaim.claimName",
        ),
        ({"model": {"source": "pvc://runs/model"}}, "PersistentVolumeClaim runs", "spec.model.source"),
        ({"trainer": {"template": READS}}, "ConfigMap key", "spec.trainer.template"),
    ],
)
def test_missing_reference_begins_with_the_field_that_names_it(spec, missing, path):
    error = MissingReferencesError((Reference(*missing.split()),))
    (cause,) = describe_pod_rejections(make_job(**spec), {"gsm8k-head": error, "gsm8k-trainer": error})[-1:]
    assert cause.reason == "ReferenceMissing"
    assert cause.message == f"{path}: {missing} does not exist; {REMEDIES['ReferenceMissing']}"
