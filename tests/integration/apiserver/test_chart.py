"""The chart on a real API server: install, upgrade, uninstall, and what its roles allow and refuse.

It has its own API server, since the other tests of this folder install the CRDs themselves. No kubelet runs: in place
of `helm test` the job that it creates is created here in a dry run.
"""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_cluster.host.go_programs import find_or_build
from tests.paths import ROOT
from tests.support import fast_yaml
from tests.support.operator_permissions import FEATURES, read_table

CHART = ROOT / "charts" / "rljob"
ACCOUNT = "system:serviceaccount:ops:rljob-operator"
NOT_FOR_THE_OPERATOR = [
    *(("", "nodes", verb) for verb in ("get", "list", "patch")),
    *(("", resource, "create") for resource in ("pods/exec", "pods/eviction", "serviceaccounts/token")),
    *(("", resource, "get") for resource in ("pods/log", "persistentvolumes", "serviceaccounts")),
    *(("", "secrets", verb) for verb in ("update", "deletecollection")),
    *(("rbac.authorization.k8s.io", "clusterroles", verb) for verb in ("create", "escalate", "bind", "get")),
    *(("rljob.dev", "rljobs", verb) for verb in ("create", "update", "patch", "deletecollection")),
    *(("rljob.dev", "rewardmodels", verb) for verb in ("create", "patch", "delete")),
    *(("apiextensions.k8s.io", "customresourcedefinitions", verb) for verb in ("create", "patch", "delete")),
    ("example.com", "secrets", "get"),
    ("", "users", "impersonate"),
    ("coordination.k8s.io", "leases", "delete"),
]


@pytest.fixture(scope="module")
def plane(tmp_path_factory, loopback):
    with ControlPlane(tmp_path_factory.mktemp("chart"), address=f"{loopback}.2") as running:
        yield running


@pytest.fixture(scope="module")
def call(plane):
    """Return a function that runs kubectl or helm as cluster-admin and returns the output."""
    programs = find_or_build("helm", "kubectl")

    def run(name, *arguments, given=None, check=True):
        command = [programs / name, "--kubeconfig", plane.kubeconfig, *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{name} {arguments}:\n{done.stdout}{done.stderr}"
        return done.stdout if check else done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def installed(call):
    # As in docs/install.md, without --wait: no kubelet makes the Deployment ready.
    for namespace in ("research", "prod"):
        call("kubectl", "create", "namespace", namespace)
    call("helm", "install", "rljob", str(CHART), "--namespace", "ops", "--create-namespace")
    crds = ("crd/rljobs.rljob.dev", "crd/rewardmodels.rljob.dev")
    call("kubectl", "wait", "--for=condition=Established", *crds, "--timeout=30s")


@pytest.fixture(scope="module")
def may(call):
    """Return a function that returns which (group, resource, verb) a user may do, by SubjectAccessReviews."""

    def run(user, wanted, namespace):
        reviews = [build_review(user, *one, namespace) for one in wanted]
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews})
        answer = call("kubectl", "create", "-f", "-", "-o", "json", given=given)
        decoder, items, position = json.JSONDecoder(), [], 0
        while position < len(answer.rstrip()):
            item, position = decoder.raw_decode(answer, position)
            position += len(answer[position:]) - len(answer[position:].lstrip())
            items += item.get("items", [item])
        assert len(items) == len(reviews), "each review needs its answer"
        return {one for one, item in zip(wanted, items, strict=True) if item["status"]["allowed"]}

    return run


def build_review(user, group, resource, verb, namespace):
    resource, _, subresource = resource.partition("/")
    name = {"leases": "rljob-operator"}.get(resource, "") if verb != "create" else ""
    requested = {"group": group, "resource": resource, "subresource": subresource, "verb": verb, "name": name}
    attributes = {**requested, "namespace": namespace}
    groups = ["system:serviceaccounts", "system:authenticated"] if user.startswith("system:") else []
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": groups, "resourceAttributes": attributes},
    }


def test_operator_may_do_each_verb_of_its_table(installed, may):
    jobs, leases = split_leases(read_table())
    assert may(ACCOUNT, jobs, "research") == set(jobs)
    assert may(ACCOUNT, leases, "ops") == set(leases)


def split_leases(table):
    leases = sorted(one for one in table if one[1] == "leases")
    return sorted(table - set(leases)), leases


def test_operator_may_do_what_features_need_only_with_them(installed, call, may):
    """tests/process/charts compares the rendered roles of each feature."""
    jobs, _ = split_leases(read_table(*FEATURES) - read_table())
    assert may(ACCOUNT, jobs, "research") == set()
    sets = ",".join(f"features.{name}=true" for name in FEATURES)
    call("helm", "upgrade", "rljob", str(CHART), "--namespace", "ops", "--set", sets)
    assert may(ACCOUNT, jobs, "research") == set(jobs)
    call("helm", "upgrade", "rljob", str(CHART), "--namespace", "ops", "--reset-values")
    assert may(ACCOUNT, jobs, "research") == set()


def test_operator_may_do_nothing_else(installed, may):
    assert may(ACCOUNT, NOT_FOR_THE_OPERATOR, "research") == set()
    leases = split_leases(read_table())[1]
    assert may(ACCOUNT, leases, "research") == set(), "only the Lease in the namespace of the release"


def test_namespaced_operator_may_reach_only_its_namespaces(installed, call, may):
    set_ = "watchNamespaces={research},crds.install=false,rbac.aggregate=false"
    call("helm", "install", "rljob-one", str(CHART), "--namespace", "ops", "--set", set_)
    account = "system:serviceaccount:ops:rljob-one-operator"
    wanted = [one for one in read_table() if one[0] in ("", "rljob.dev", "batch") and one[1] != "namespaces"]
    assert may(account, wanted, "research") == set(wanted)
    assert may(account, wanted, "prod") == set()
    call("helm", "uninstall", "rljob-one", "--namespace", "ops")


def test_job_of_helm_test_is_accepted(installed, call):
    """Also by the template policy, which denies by default."""
    source = (CHART / "files" / "helm_test.py").read_text()
    scope: dict = {}
    exec(source[: source.index("def ask")], scope)  # its data, without its requests
    call("kubectl", "-n", "research", "create", "--dry-run=server", "-f", "-", given=json.dumps(scope["JOB"]))


def test_operator_pod_is_admitted_by_the_restricted_pod_security_standard(installed, call):
    call("kubectl", "label", "namespace", "ops", "pod-security.kubernetes.io/enforce=restricted")
    deployment = json.loads(call("kubectl", "-n", "ops", "get", "deployment", "rljob-operator", "-o", "json"))
    template = deployment["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "like-the-operator"}, "spec": template["spec"]}
    call("kubectl", "-n", "ops", "create", "--dry-run=server", "-f", "-", given=json.dumps(pod))
    template["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    message = call("kubectl", "-n", "ops", "create", "--dry-run=server", "-f", "-", given=json.dumps(pod), check=False)
    assert "allowPrivilegeEscalation" in message, "otherwise the standard is not enforced"


def test_upgrade_changes_a_crd_and_uninstall_keeps_it_with_the_jobs(installed, call, tmp_path):
    scope: dict = {}
    source = (CHART / "files" / "helm_test.py").read_text()
    exec(source[: source.index("def ask")], scope)
    call("kubectl", "-n", "prod", "create", "-f", "-", given=json.dumps(scope["JOB"]))
    newer = tmp_path / "rljob"
    shutil.copytree(CHART, newer)
    path = newer / "templates" / "crds" / "rljobs.rljob.dev.yaml"
    path.write_text(path.read_text().replace("    - rlj\n", "    - rlj\n    - rlnew\n"))
    call("helm", "upgrade", "rljob", str(newer), "--namespace", "ops")
    crd = fast_yaml.load(call("kubectl", "get", "crd", "rljobs.rljob.dev", "-o", "yaml"))
    assert crd["spec"]["names"]["shortNames"] == ["rlj", "rlnew"]
    call("helm", "uninstall", "rljob", "--namespace", "ops")
    assert "helm-test" in call("kubectl", "-n", "prod", "get", "rljobs", "-o", "name")
    assert call("kubectl", "-n", "ops", "get", "deployments", "-o", "name") == ""
    call("helm", "install", "rljob", str(CHART), "--namespace", "ops")
