"""Dry runs of workloads and their Pods, with a recorded API server."""

import copy

import pytest

from rljob_api.errors import TransientError
from rljob_core.backend import FieldProblem, ForbiddenError, PodRejectedError, Reference, RefusedError, UnansweredError
from rljob_core.children import WORKLOAD_KINDS, build_children
from rljob_core.defaults import DEFAULTS
from rljob_core.kube.client import METADATA_ONLY, ApiError
from rljob_operator.kube.preflight import VERDICT_SECONDS, Preflight
from tests.support.job_simulation import make_job

GPUS = "requests.nvidia.com/gpu"
DNS = {"reason": "FieldValueNotSupported", "message": "Unsupported value", "field": "spec.dnsPolicy"}


class Api:
    """Answers with the error of a kind, and records the requests."""

    def __init__(self):
        self.errors, self.requests, self.now = {}, [], 0.0
        self.reads, self.missing, self.ranges = [], set(), []
        self.preflight = Preflight(self.call, lambda: self.now)

    async def call(self, method, resource, namespace, *path, query=None, body=None, **options):
        if method == "GET":
            return self.read(resource.kind, *path, **options)
        assert query["dryRun"] == "All", "nothing may be written"
        self.requests.append((method, resource.kind, body))
        if error := self.errors.get(resource.kind):
            raise error
        return {}

    def read(self, kind, name="", accept=""):
        self.reads.append((kind, name))
        if error := self.errors.get(kind):
            raise error
        if name in self.missing:
            raise ApiError(404, "NotFound", "not found")
        assert kind == "LimitRange" or accept == METADATA_ONLY, "no data is read"
        return {"items": self.ranges}

    async def check(self, workload, known=None):
        self.requests.clear()
        await self.preflight.check(workload, known)


@pytest.fixture
def api():
    return Api()


def build(kind="StatefulSet", job="gsm8k", uid="u1", **spec):
    made = make_job(**spec)
    metadata = made.metadata.model_copy(update={"name": job, "uid": uid})
    children = build_children(made.model_copy(update={"metadata": metadata}), "token", DEFAULTS)
    return next(child for child in children if child["kind"] == kind)


@pytest.mark.parametrize("kind", WORKLOAD_KINDS)
async def test_workload_and_then_a_pod_as_its_controller_creates_it_are_dry_run(api, kind):
    workload = build(kind)
    await api.check(workload)
    (patch, sent), (post, pod) = [(method, body) for method, _, body in api.requests]
    assert (patch, post, pod["kind"]) == ("PATCH", "POST", "Pod")
    assert sent["metadata"]["resourceVersion"] == "1", "an existing object is not changed, but a conflict"
    assert pod["spec"] == workload["spec"]["template"]["spec"]
    assert pod["metadata"]["labels"] == workload["spec"]["template"]["metadata"]["labels"]
    assert pod["metadata"]["ownerReferences"] == workload["metadata"]["ownerReferences"]
    assert pod["metadata"]["generateName"].startswith(workload["metadata"]["name"])


async def test_replacement_is_checked_under_another_name_of_legal_length(api):
    workload = build("Job", job="g" * 40)
    await api.check(workload, known=workload)
    name = api.requests[0][2]["metadata"]["name"]
    assert name != workload["metadata"]["name"]
    assert len(name) <= 53


async def test_refused_workload_gets_no_pod_and_a_refused_pod_names_its_field(api):
    api.errors = {"StatefulSet": ApiError(422, "Invalid", "is invalid", [DNS])}
    with pytest.raises(RefusedError):
        await api.check(build())
    assert len(api.requests) == 1
    api.errors = {"Pod": ApiError(422, "Invalid", "is invalid", [DNS])}
    with pytest.raises(RefusedError) as raised:
        await api.check(build(trainer={"replicas": 2}))
    assert raised.value.fields == (FieldProblem("spec.template.spec.dnsPolicy", "Unsupported value"),)


@pytest.mark.parametrize(
    ("kind", "code", "message", "error"),
    [
        ("StatefulSet", 403, 'is forbidden: User "op" cannot patch', ForbiddenError),
        ("StatefulSet", 403, "is forbidden: exceeded quota: q, requested: 1", ForbiddenError),
        ("StatefulSet", 500, "etcd timed out", TransientError),
        ("Pod", 403, 'violates PodSecurity "restricted"', PodRejectedError),
        ("Pod", 403, "is forbidden: failed quota: q: must specify limits.cpu", PodRejectedError),
        (
            "Pod",
            403,
            f"exceeded quota: q, requested: {GPUS}=8,pods=1, used: pods=0, limited: {GPUS}=4",
            PodRejectedError,
        ),
        ("Pod", 403, "exceeded quota: q, requested: cpu=4500m, used: cpu=0, limited: cpu=4", PodRejectedError),
        ("Pod", 422, "ValidatingAdmissionPolicy 'p' denied request: no", PodRejectedError),
        ("Pod", 500, 'failed calling webhook "w": timeout', UnansweredError),
    ],
)
async def test_refusal_has_its_type(api, kind, code, message, error):
    api.errors = {kind: ApiError(code, "", message)}
    with pytest.raises(error) as raised:
        await api.check(build())
    assert type(raised.value) is error


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("StatefulSet", 409, "the object has been modified"),
        ("StatefulSet", 400, 'admission webhook "w" does not support dry run'),
        ("Pod", 400, 'admission webhook "w" does not support dry run'),
        ("Pod", 403, 'pods is forbidden: User "op" cannot create resource "pods"'),
        ("Pod", 403, "is forbidden: exceeded quota: q, requested: pods=1, used: pods=3, limited: pods=3"),
    ],
)
async def test_what_only_the_real_request_can_find_out_is_left_to_it(api, kind, code, message):
    api.errors = {kind: ApiError(code, "", message)}
    await api.check(build())


async def test_refused_template_is_remembered_for_a_while(api):
    api.errors = {"Pod": ApiError(422, "Invalid", "is invalid", [DNS])}
    for _ in range(3):
        with pytest.raises(RefusedError):
            await api.check(build())
    assert api.requests == []
    api.errors, api.now = {}, VERDICT_SECONDS
    await api.check(build())
    assert len(api.requests) == 2


@pytest.mark.parametrize("code", [403, 503])
async def test_what_may_be_granted_or_pass_is_checked_again(api, code):
    api.errors = {"Pod": ApiError(code, "", "not now")}
    for _ in range(2):
        with pytest.raises(TransientError):
            await api.check(build())
        assert len(api.requests) == 2
    api.errors = {}
    await api.check(build())


async def test_jobs_of_a_sweep_are_checked_once(api):
    await api.check(build(job="sweep-1", uid="0001"))
    await api.check(build(job="sweep-2", uid="0002", schedule={"steps": 7}))
    assert api.requests == [], "they differ in their names and our annotations only"
    await api.check(build(job="sweep-3", uid="0003", trainer={"resources": {"limits": {"cpu": 7}}}))
    assert len(api.requests) == 2
    labelled = copy.deepcopy(build(job="sweep-4", uid="0004"))
    labelled["spec"]["template"]["metadata"]["annotations"]["team"] = "a"
    await api.check(labelled)
    assert len(api.requests) == 2, "a policy may read it"


async def test_refusal_of_one_job_is_not_that_of_another(api):
    api.errors = {"Pod": ApiError(422, "Invalid", "not for sweep-1")}
    with pytest.raises(RefusedError):
        await api.check(build(job="sweep-1", uid="0001"))
    api.errors = {}
    await api.check(build(job="sweep-2", uid="0002"))
    assert len(api.requests) == 2


FROM_SECRET = [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "key", "key": "k"}}}]
READS = {
    "spec": {
        "volumes": [{"name": "more", "configMap": {"name": "settings"}}, {"name": "x", "secret": {"secretName": "a"}}],
        "containers": [{"name": "trainer", "env": FROM_SECRET, "envFrom": [{"secretRef": {"name": "all"}}]}],
    }
}


async def test_missing_secrets_and_config_maps_are_named(api):
    api.missing = {"key", "settings"}
    workload = build(trainer={"template": READS})
    (missing,) = await api.preflight.find_missing([workload])
    assert missing == (Reference("Secret", "key"), Reference("ConfigMap", "settings"))
    assert set(api.reads) == {("Secret", "key"), ("Secret", "all"), ("ConfigMap", "settings"), ("Secret", "a")}
    assert api.requests == []
    api.missing = set()
    assert await api.preflight.find_missing([workload]) == [()]


async def test_secret_of_several_roles_is_read_once(api):
    api.missing = {"token"}
    job = {"hub": {"tokenSecretRef": {"name": "token", "key": "k"}}}
    roles = [build("Job", **job), build("StatefulSet", **job), build("Deployment", **job)]
    assert await api.preflight.find_missing(roles) == [(Reference("Secret", "token"),)] * 3
    assert api.reads == [("Secret", "token")]


async def test_references_of_each_job_of_a_sweep_are_looked_for(api):
    def read(job):
        volumes = [{"name": "x", "configMap": {"name": f"settings-{job}"}}]
        return build(job=job, uid=job, trainer={"template": {"spec": {"volumes": volumes}}})

    api.missing = {"settings-sweep-2"}
    await api.check(read("sweep-1"))
    assert await api.preflight.find_missing([read("sweep-2")]) == [(Reference("ConfigMap", "settings-sweep-2"),)]


async def test_references_of_a_workload_with_a_verdict_are_not_read_again(api):
    await api.check(build(job="sweep-1", uid="0001", trainer={"template": READS}))
    assert await api.preflight.find_missing([build(job="sweep-2", uid="0002", trainer={"template": READS})]) == [()]
    assert api.reads == []


async def test_operator_that_may_not_read_secrets_leaves_them_to_the_kubelet(api):
    api.errors = {"Secret": ApiError(403, "Forbidden", "no")}
    assert await api.preflight.find_missing([build(trainer={"template": READS})]) == [()]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (403, 'pods "x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi'),
        (403, 'pods "x" is forbidden: minimum cpu usage per Container is 100m.  No request is specified'),
        (403, 'pods "x" is forbidden: cpu max limit to request ratio per Pod is 2, but provided ratio is 4.000000'),
        (
            422,
            'Pod "x" is invalid: spec.containers[0].resources.requests: Invalid value: "1Gi": must be less than or '
            "equal to memory limit of 512Mi",
        ),
    ],
)
async def test_pod_that_a_limit_range_refuses_waits(api, code, message):
    api.errors = {"Pod": ApiError(code, "", message)}
    with pytest.raises(PodRejectedError, match=r"memory|cpu") as raised:
        await api.check(build())
    assert raised.value.cause == "LimitRange"
