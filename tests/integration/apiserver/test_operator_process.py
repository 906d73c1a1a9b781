"""The operator as a process that the chart starts: its arguments, its ServiceAccount, and only its roles.

Each test has its own operator. It waits for conditions of the cluster with a deadline, and shows the operator's log
when they do not come.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, dynamic

from rljob_cluster.host.go_programs import find_or_build
from tests.integration.apiserver.admin_client import MERGE_PATCH, AdminClient
from tests.integration.apiserver.cluster_simulator import ClusterSimulator
from tests.integration.apiserver.manifests import smallest
from tests.paths import ROOT
from tests.support import fast_yaml
from tests.support.waiting import DEADLINE_SECONDS

POLL_SECONDS = 0.1
NAME = "smallest"
WORKLOADS = (("Job", "head"), ("StatefulSet", "trainer"), ("Deployment", "rollout"), ("Deployment", "reward-correct"))


class ProcessHarness:
    """One namespace with one operator process."""

    def __init__(self, control_plane: Any, admin: AdminClient, log: Path) -> None:
        self.control_plane, self.admin, self.log = control_plane, admin, log
        self.simulator = ClusterSimulator(admin)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, kubeconfig: Path, *options: str) -> None:
        command = [sys.executable, "-m", "rljob_operator", *options, f"--kubeconfig={kubeconfig}"]
        with self.log.open("wb") as file:
            arguments = [*command, "--metrics-port=0", "--health-port=0"]
            self.process = subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT)

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    def child(self, kind: str, suffix: str) -> dict[str, Any] | None:
        return self.admin.find(kind, f"{NAME}-{suffix}")

    def has_all_workloads(self) -> bool:
        return all(self.child(*workload) for workload in WORKLOADS)

    def is_running(self) -> bool:
        job = self.admin.find("RLJob", NAME) or {}
        conditions = (job.get("status") or {}).get("conditions") or []
        return any(c["type"] == "Running" and c["status"] == "True" for c in conditions)

    def events(self, reason: str) -> list[str]:
        events = self.admin.core.list_namespaced_event(self.admin.namespace).items
        return [event.message for event in events if event.reason == reason]

    def until(self, what: str, holds: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (value := holds()):
            assert time.monotonic() < deadline, f"never came: {what}\n{self.log.read_text()[-4000:]}"
            time.sleep(POLL_SECONDS)
        return value


@pytest.fixture
def harness(control_plane, admin, tmp_path) -> Iterator[ProcessHarness]:
    created = ProcessHarness(control_plane, admin, tmp_path / "operator.log")
    yield created
    created.stop()


class Chart:
    """The chart, rendered for one namespace, with its roles created and its ServiceAccount's token in a kubeconfig."""

    def __init__(self, harness: ProcessHarness, api: client.ApiClient, *values: str) -> None:
        namespace = harness.admin.namespace
        command = [find_or_build("helm") / "helm", "template", namespace, ROOT / "charts" / "rljob"]
        command += [f"--namespace={namespace}", "--set=rbac.aggregate=false", *values]
        rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.objects = [o for o in fast_yaml.load_all(rendered) if o and "helm.sh/hook" not in str(o["metadata"])]
        self._resources = dynamic.DynamicClient(api).resources
        for manifest in self.objects:
            if manifest["kind"] == "ServiceAccount" or manifest["apiVersion"].startswith("rbac."):
                self._resource(manifest).create(body=manifest, **_scope(manifest))
        self.kubeconfig = harness.log.with_name("operator.kubeconfig")
        self._write_kubeconfig(harness)

    @property
    def arguments(self) -> list[str]:
        (deployment,) = (o for o in self.objects if o["kind"] == "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        return [self._mounted(argument) for argument in container["args"]]

    def _mounted(self, argument: str) -> str:
        """An argument with the folder in which the ConfigMap's file is here instead of in a Pod."""
        flag, _, path = argument.partition("=")
        if flag != "--defaults":
            return argument
        (config,) = (o for o in self.objects if o["kind"] == "ConfigMap" and Path(path).name in o["data"])
        file = self.kubeconfig.with_name(Path(path).name)
        file.write_text(config["data"][file.name])
        return f"{flag}={file}"

    def find_role(self, resource: str) -> dict[str, Any]:
        roles = (o for o in self.objects if o["kind"] in ("Role", "ClusterRole"))
        return next(role for role in roles if any(resource in rule["resources"] for rule in role["rules"]))

    def put_role(self, role: dict[str, Any]) -> None:
        self._resource(role).patch(body=role, content_type=MERGE_PATCH, **_scope(role))

    def delete_cluster_roles(self) -> None:
        for manifest in self.objects:
            if manifest["kind"].startswith("ClusterRole"):
                self._resource(manifest).delete(name=manifest["metadata"]["name"])

    def _resource(self, manifest: dict[str, Any]) -> Any:
        return self._resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])

    def _write_kubeconfig(self, harness: ProcessHarness) -> None:
        account = next(o["metadata"]["name"] for o in self.objects if o["kind"] == "ServiceAccount")
        body = {"spec": {"expirationSeconds": 3600}}
        core, namespace = harness.admin.core, harness.admin.namespace
        token = core.create_namespaced_service_account_token(account, namespace, body).status.token
        config = fast_yaml.load(harness.control_plane.kubeconfig.read_text())
        config["users"] = [{**user, "user": {"token": token}} for user in config["users"]]
        with os.fdopen(os.open(self.kubeconfig, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(yaml.safe_dump(config))


def _scope(manifest: dict[str, Any]) -> dict[str, str]:
    return {} if manifest["kind"].startswith("Cluster") else {"namespace": manifest["metadata"]["namespace"]}


@pytest.fixture
def render_chart(harness, api_client) -> Iterator[Callable[..., Chart]]:
    with contextlib.ExitStack() as stack:

        def render(*values: str) -> Chart:
            chart = Chart(harness, api_client, *values)
            stack.callback(chart.delete_cluster_roles)
            return chart

        yield render


@pytest.mark.parametrize("is_cluster_wide", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_chart_grants_all_permissions_for_the_life_of_a_job(harness, render_chart, is_cluster_wide):
    admin = harness.admin
    values = ["--set", "defaults.labels.team=rl,defaults.podSecurityContext.runAsUser=null"]
    chart = render_chart(*values, *([] if is_cluster_wide else ["--set", f"watchNamespaces={{{admin.namespace}}}"]))
    harness.start(chart.kubeconfig, *chart.arguments)
    admin.create(smallest(name=NAME))
    harness.until("all workloads", harness.has_all_workloads)
    pod = harness.child("StatefulSet", "trainer")["spec"]["template"]
    assert (pod["metadata"]["labels"]["team"], pod["spec"]["securityContext"]["runAsNonRoot"]) == ("rl", True)
    assert "runAsUser" not in pod["spec"]["securityContext"], "null leaves it to the platform"
    harness.simulator.step()
    admin.patch("RLJob", NAME, {"spec": {"rollout": {"replicas": 2}}})
    harness.until("the new replicas", lambda: harness.child("Deployment", "rollout")["spec"]["replicas"] == 2)
    for pod in harness.simulator.pods():
        harness.simulator.set_ready(pod)
    harness.until("Running", harness.is_running)
    harness.until("its event", lambda: harness.events("Running"))
    harness.simulator.complete(harness.child("Job", "head"))
    if is_cluster_wide:
        kubectl_wait(harness, "--for=condition=Succeeded")
    admin.patch("RLJob", NAME, {"spec": {"ttlSecondsAfterFinished": 1}})
    harness.until("the job's deletion after its time to live", lambda: admin.find("RLJob", NAME) is None)
    (lease,) = client.CoordinationV1Api(admin.core.api_client).list_namespaced_lease(admin.namespace).items
    assert f"--lease-name={lease.metadata.name}" in chart.arguments
    assert lease.spec.holder_identity
    # A cluster-wide operator also sees the jobs that other tests left on this API server.
    lines = harness.log.read_text().lower().splitlines()
    own = [line for line in lines if admin.namespace in line or not re.search(r"test-[0-9a-f]{8}/", line)]
    assert "forbidden" not in "\n".join(own)


def kubectl_wait(harness: ProcessHarness, condition: str) -> None:
    command = [find_or_build("kubectl") / "kubectl", f"--kubeconfig={harness.control_plane.kubeconfig}", "wait"]
    command += ["rljob", NAME, f"--namespace={harness.admin.namespace}", condition]
    done = subprocess.run([*command, "--timeout=60s"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + harness.log.read_text()


@pytest.mark.slow
def test_missing_rbac_verb_of_the_chart_is_reported_until_granted(harness, render_chart):
    chart = render_chart("--set", f"watchNamespaces={{{harness.admin.namespace}}}")
    role = chart.find_role("statefulsets")
    rules = [
        {**rule, "verbs": [v for v in rule["verbs"] if v != "patch" or "statefulsets" not in rule["resources"]]}
        for rule in role["rules"]
    ]
    chart.put_role({**role, "rules": rules})
    harness.start(chart.kubeconfig, *chart.arguments)
    harness.admin.create(smallest(name=NAME))
    message = harness.until("the event", lambda: harness.events("Forbidden"))[0]
    assert "RBAC does not allow the operator to patch" in message
    assert "Traceback" not in harness.log.read_text()
    assert harness.process.poll() is None
    chart.put_role(role)
    harness.until("all workloads", harness.has_all_workloads)
