"""The operator as its own process against a real API server: plain days, and the bad ones a user meets.

Also as the chart starts it: by its arguments, as its ServiceAccount, with its roles and no more. Each test has an
operator of its own for one namespace, so nothing of one shows in another. The tests wait for a condition of the cluster
with a deadline, and show the operator's log when it does not come.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_player import Player
from direct_backend import CHILD_KINDS, DirectBackend
from kubernetes import client, dynamic
from manifests import smallest

from rljob_api.wire.contract import LABEL_JOB
from rljob_cluster.host import go_programs
from tests.paths import ROOT

DEADLINE_SECONDS = 120.0
NAME = "smallest"


class Operator:
    """`python -m rljob_operator`."""

    def __init__(self, kubeconfig: Path, log: Path, *options: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "rljob_operator", *options, f"--kubeconfig={kubeconfig}"]
        command += ["--metrics-port=0", "--health-port=0"]
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Stage:
    """One namespace with its operators, and hands to change it."""

    def __init__(self, control_plane: Any, api: client.ApiClient, namespace: str, folder: Path) -> None:
        self.control_plane, self.api, self.namespace, self.folder = control_plane, api, namespace, folder
        self.world = DirectBackend(dynamic.DynamicClient(api))
        self.player = Player(self.world, namespace)
        self.operators: list[Operator] = []
        client.CoreV1Api(api).create_namespaced_service_account(namespace, {"metadata": {"name": "default"}})

    def start(self, *options: str) -> Operator:
        """For this namespace alone, as the administrator."""
        namespace = f"--namespace={self.namespace}"
        return self.start_as(self.control_plane.kubeconfig, namespace, *(options or ["--no-lease"]))

    def start_as(self, kubeconfig: Path, *options: str) -> Operator:
        operator = Operator(kubeconfig, self.folder / f"operator-{len(self.operators)}.log", *options)
        self.operators.append(operator)
        return operator

    def create_job(self) -> None:
        self.world.resource("RLJob").create(body=smallest(name=NAME), namespace=self.namespace)

    def child(self, kind: str, name: str) -> dict[str, Any] | None:
        return self.world.find(kind, self.namespace, f"{NAME}-{name}")

    def condition(self, type_: str) -> dict[str, Any]:
        job = self.world.find("RLJob", self.namespace, NAME) or {}
        found = (job.get("status") or {}).get("conditions") or []
        return next((c for c in found if c["type"] == type_), {})

    def until(self, what: str, holds: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (value := holds()):
            assert time.monotonic() < deadline, f"never came: {what}\n{self.logs()}"
            time.sleep(0.1)  # between looks at the condition
        return value

    def logs(self) -> str:
        return "\n".join(f"{o.log.name}:\n{o.log.read_text()[-4000:]}" for o in self.operators)


@pytest.fixture
def stage(control_plane, api_client, namespace, tmp_path) -> Iterator[Stage]:
    made = Stage(control_plane, api_client, namespace, tmp_path)
    with contextlib.ExitStack() as stack:
        yield made
        for operator in made.operators:
            stack.callback(operator.kill)


def has_all_workloads(stage: Stage) -> bool:
    wanted = (("Job", "head"), ("StatefulSet", "trainer"), ("Deployment", "rollout"), ("Deployment", "reward-correct"))
    return all(stage.child(kind, name) for kind, name in wanted)


def test_a_job_becomes_its_children_and_a_deleted_or_edited_one_comes_back(stage):
    stage.start()
    stage.create_job()
    stage.until("all workloads", lambda: has_all_workloads(stage))
    deployment = stage.child("Deployment", "rollout")
    body = {"propagationPolicy": "Background"}
    stage.world.resource("Deployment").delete(name=f"{NAME}-rollout", namespace=stage.namespace, body=body)
    stage.until(
        "the deleted Deployment, anew",
        lambda: (
            (found := stage.child("Deployment", "rollout"))
            and found["metadata"]["uid"] != deployment["metadata"]["uid"]
        ),
    )
    edit = {"metadata": {"name": f"{NAME}-trainer"}, "spec": {"replicas": 7}}
    patch = stage.world.resource("StatefulSet").patch
    patch(body=edit, namespace=stage.namespace, content_type="application/merge-patch+json")
    stage.until(
        "the edited StatefulSet as planned", lambda: stage.child("StatefulSet", "trainer")["spec"]["replicas"] == 1
    )


def test_kubectl_wait_sees_the_end_that_the_heads_job_came_to(stage):
    stage.start()
    stage.create_job()
    head = stage.until("the head's Job", lambda: stage.child("Job", "head"))
    stage.player.complete(head)
    command = [go_programs.find_or_build("kubectl") / "kubectl", f"--kubeconfig={stage.control_plane.kubeconfig}"]
    command += ["wait", "rljob", NAME, f"--namespace={stage.namespace}", "--for=condition=Succeeded"]
    done = subprocess.run([*command, f"--timeout={DEADLINE_SECONDS:.0f}s"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + stage.logs()


def test_a_second_operator_takes_over_when_the_first_is_killed(stage):
    lease = [f"--lease-namespace={stage.namespace}"]
    first = stage.start(*lease)
    stage.create_job()
    stage.until("all workloads, by the first", lambda: has_all_workloads(stage))
    stage.start(*lease)
    first.kill()
    body = {"propagationPolicy": "Background"}
    stage.world.resource("Deployment").delete(name=f"{NAME}-rollout", namespace=stage.namespace, body=body)
    stage.until("the Deployment, by the second", lambda: stage.child("Deployment", "rollout"))


@pytest.mark.parametrize(
    ("kind", "suffix", "content"),
    [
        ("ConfigMap", "config", {"data": {"mine": "yes"}}),
        ("Service", "head", {"spec": {"ports": [{"port": 80}]}}),
    ],
)
def test_a_foreign_object_is_left_alone_and_named_until_it_is_gone(stage, kind, suffix, content):
    name = f"{NAME}-{suffix}"
    body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **content}
    made = stage.world.resource(kind).create(body=body, namespace=stage.namespace).to_dict()
    stage.start("--no-lease", "--resync-seconds=3")  # nothing tells when a foreign object goes
    stage.create_job()
    conflict = stage.until("NameConflict", lambda: (c := stage.condition("NameConflict")).get("status") == "True" and c)
    assert f"{kind} {name}" in conflict["message"]
    assert "delete it" in conflict["message"]
    assert stage.world.find(kind, stage.namespace, name) == made
    stage.world.resource(kind).delete(name=name, namespace=stage.namespace)
    stage.until("its own object", lambda: (c := stage.child(kind, suffix)) and c["metadata"].get("ownerReferences"))
    stage.until("no NameConflict", lambda: stage.condition("NameConflict").get("status") == "False")


def test_a_deleted_job_is_forgotten_and_a_new_one_of_its_name_gets_children_of_its_own(stage):
    stage.start()
    stage.create_job()
    stage.until("all workloads", lambda: has_all_workloads(stage))
    old = stage.child("Secret", "token")["metadata"]["uid"]
    stage.world.resource("RLJob").delete(name=NAME, namespace=stage.namespace)
    stage.create_job()

    def is_new() -> bool:
        stage.player.play()  # the garbage collector: it finds the old children and leaves the new ones
        found = [c for kind in CHILD_KINDS for c in stage.world.list(kind, stage.namespace, f"{LABEL_JOB}={NAME}")]
        uid = stage.world.find("RLJob", stage.namespace, NAME)["metadata"]["uid"]
        owned = all(c["metadata"]["ownerReferences"][0]["uid"] == uid for c in found)
        return owned and has_all_workloads(stage) and stage.child("Secret", "token")["metadata"]["uid"] != old

    stage.until("children of the new job alone", is_new)


class Chart:
    """The chart, rendered for the stage's namespace, with its roles made and its ServiceAccount's token in a
    kubeconfig."""

    def __init__(self, stage: Stage, *values: str) -> None:
        command = [go_programs.find_or_build("helm") / "helm", "template", stage.namespace, ROOT / "charts" / "rljob"]
        command += [f"--namespace={stage.namespace}", "--set=rbac.aggregate=false", *values]
        rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.objects = [o for o in yaml.safe_load_all(rendered) if o and "helm.sh/hook" not in str(o["metadata"])]
        self._resources = dynamic.DynamicClient(stage.api).resources
        for wanted in self.objects:
            if wanted["kind"] == "ServiceAccount" or wanted["apiVersion"].startswith("rbac."):
                self._of(wanted).create(body=wanted, **self._where(wanted))
        self.kubeconfig = stage.folder / "operator.kubeconfig"
        self._write_kubeconfig(stage, client.CoreV1Api(stage.api))

    @property
    def arguments(self) -> list[str]:
        (deployment,) = (o for o in self.objects if o["kind"] == "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        return list(container["args"])

    def role_of(self, resource: str) -> dict[str, Any]:
        roles = (o for o in self.objects if o["kind"] in ("Role", "ClusterRole"))
        return next(role for role in roles if any(resource in rule["resources"] for rule in role["rules"]))

    def put_role(self, role: dict[str, Any]) -> None:
        self._of(role).patch(body=role, content_type="application/merge-patch+json", **self._where(role))

    def delete_cluster_roles(self) -> None:
        for made in self.objects:
            if made["kind"].startswith("ClusterRole"):
                self._of(made).delete(name=made["metadata"]["name"])

    def _of(self, wanted: dict[str, Any]) -> Any:
        return self._resources.get(api_version=wanted["apiVersion"], kind=wanted["kind"])

    def _where(self, wanted: dict[str, Any]) -> dict[str, str]:
        return {} if wanted["kind"].startswith("Cluster") else {"namespace": wanted["metadata"]["namespace"]}

    def _write_kubeconfig(self, stage: Stage, core: client.CoreV1Api) -> None:
        account = next(o["metadata"]["name"] for o in self.objects if o["kind"] == "ServiceAccount")
        body = {"spec": {"expirationSeconds": 3600}}
        token = core.create_namespaced_service_account_token(account, stage.namespace, body).status.token
        config = yaml.safe_load(stage.control_plane.kubeconfig.read_text())
        config["users"] = [{**user, "user": {"token": token}} for user in config["users"]]
        with os.fdopen(os.open(self.kubeconfig, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(yaml.safe_dump(config))


@pytest.fixture
def chart(stage) -> Iterator[Callable[..., Chart]]:
    """A function that renders the chart with some values."""
    with contextlib.ExitStack() as stack:

        def render(*values: str) -> Chart:
            made = Chart(stage, *values)
            stack.callback(made.delete_cluster_roles)
            return made

        yield render


@pytest.mark.parametrize("is_cluster_wide", [False, True])
def test_what_the_chart_starts_needs_no_more_than_its_roles_for_a_jobs_whole_life(stage, chart, is_cluster_wide):
    rendered = chart(*([] if is_cluster_wide else ["--set", f"watchNamespaces={{{stage.namespace}}}"]))
    operator = stage.start_as(rendered.kubeconfig, *rendered.arguments)
    stage.create_job()
    stage.until("all workloads", lambda: has_all_workloads(stage))
    stage.player.play()
    edit = {"metadata": {"name": NAME}, "spec": {"rollout": {"replicas": 2}, "ttlSecondsAfterFinished": 2}}
    patch = stage.world.resource("RLJob").patch
    patch(body=edit, namespace=stage.namespace, content_type="application/merge-patch+json")
    stage.until("the new replicas", lambda: stage.child("Deployment", "rollout")["spec"]["replicas"] == 2)
    for pod in stage.player.pods():
        stage.player.set_ready(pod)
    stage.until("Running", lambda: stage.condition("Running").get("status") == "True")
    told = client.CoreV1Api(stage.api).list_namespaced_event
    stage.until("its event", lambda: any(e.reason == "Running" for e in told(stage.namespace).items))
    stage.player.complete(stage.child("Job", "head"))
    stage.until("the job's end, by its ttl", lambda: stage.world.find("RLJob", stage.namespace, NAME) is None)
    (lease,) = client.CoordinationV1Api(stage.api).list_namespaced_lease(stage.namespace).items
    assert f"--lease-name={lease.metadata.name}" in rendered.arguments
    assert lease.spec.holder_identity
    assert "forbidden" not in operator.log.read_text().lower(), stage.logs()


def test_a_verb_that_the_role_lacks_is_told_in_the_jobs_events_and_the_work_goes_on_once_it_is_granted(stage, chart):
    rendered = chart("--set", f"watchNamespaces={{{stage.namespace}}}")
    whole = rendered.role_of("statefulsets")
    less = [
        {**rule, "verbs": [v for v in rule["verbs"] if v != "patch" or "statefulsets" not in rule["resources"]]}
        for rule in whole["rules"]
    ]
    rendered.put_role({**whole, "rules": less})
    operator = stage.start_as(rendered.kubeconfig, *rendered.arguments)
    stage.create_job()

    def events() -> str:
        found = client.CoreV1Api(stage.api).list_namespaced_event(stage.namespace).items
        return "\n".join(event.message for event in found if event.reason == "Forbidden")

    words = stage.until("the event", events)
    assert "RBAC does not let the operator patch" in words
    assert "grant that verb to its service account" in words
    assert "Traceback" not in operator.log.read_text()
    assert operator.process.poll() is None
    rendered.put_role(whole)
    stage.until("all workloads", lambda: has_all_workloads(stage))
