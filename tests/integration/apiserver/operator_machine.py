"""The core of the operator's state machine: an operator under faults, a simulated cluster, and what must always hold.

Owns settling and all checks. Its subclasses JobRules and ModelRules add what users and the cluster do. When the faults
stop, everything must settle: the cluster is what the oracles derive from the stored manifests, further reconciles write
nothing, and no status was ever written that contradicts its generation.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from kubernetes import client

from rljob_core.defaults import DEFAULTS
from tests.integration.apiserver import job_oracle, reward_oracle
from tests.integration.apiserver.admin_client import AdminClient, Manifest
from tests.integration.apiserver.cluster_simulator import ClusterSimulator
from tests.integration.apiserver.fault_proxy import LIST_FAULTS, WRITE_FAULTS
from tests.integration.apiserver.job_oracle import Key
from tests.integration.apiserver.operator_thread import OperatorThread
from tests.support.waiting import DEADLINE_SECONDS

JOB_NAME = "lifted"
POLL_SECONDS = 0.05
MAX_SETTLE_ROUNDS = 3
"""How often something may still be written when everything is as it must be, such as the last message of a status."""
REQUEST_NUMBERS = st.sampled_from([1, 2, 1, 3, 2, 4, 6, 9, 13, 19])
"""An edit takes a few writes, a new job thirty."""
FAULTS = st.tuples(
    st.dictionaries(REQUEST_NUMBERS, st.sampled_from(WRITE_FAULTS), min_size=1, max_size=4),
    st.dictionaries(REQUEST_NUMBERS, st.sampled_from(LIST_FAULTS), max_size=1),
)
FOREIGN_LABELS = {"app.kubernetes.io/managed-by": "someone"}
INJECTED: Counter[str] = Counter()
"""The faults that were injected, in all examples."""


@contextlib.contextmanager
def ignore_status(code: int) -> Iterator[None]:
    """Ignore that the operator, or a simulated controller, was faster."""
    try:
        yield
    except client.ApiException as error:
        if error.status != code:
            raise


class OperatorMachineCore(RuleBasedStateMachine):
    """One namespace with its operator. `api`, `kubeconfig` and `address` are set by the test."""

    api: client.ApiClient
    kubeconfig: str
    address: str

    def __init__(self) -> None:
        super().__init__()
        self.namespace = f"machine-{uuid.uuid4().hex[:8]}"
        self.admin = AdminClient(self.api, self.namespace)
        self.admin.core.create_namespace({"metadata": {"name": self.namespace}})
        self.admin.core.create_namespaced_service_account(self.namespace, {"metadata": {"name": "default"}})
        self.simulator = ClusterSimulator(self.admin)
        self.writes: list[tuple[str, Any, Any]] = []
        self.operator = OperatorThread(
            self.kubeconfig, self.namespace, self.address, lambda *write: self.writes.append(write)
        )
        self.has_job = self.has_model = False
        self.ended, self.num_crashes, self.num_retries = "", 0, 0
        self.ttl: int | None = None
        self.is_user_error = False
        """The job's end is cleared by a changed spec."""
        self.foreign: dict[Key, Manifest] = {}
        self.specs: dict[tuple[str, int], Manifest] = {}
        """By uid and generation."""
        self.uids: dict[Key, str] = {}
        self.disturbed: set[Key] = set()
        """Children that may be recreated."""
        self.operator.start()

    @rule()
    def kill_the_operator(self) -> None:
        self.operator.kill()

    @rule(version=st.integers(2, 4))
    def upgrade_the_operator(self, version: int) -> None:
        images = {"trainer_image": f"rljob/trainer:0.{version}.0", "reward_image": f"rljob/reward:0.{version}.0"}
        self.operator.defaults = DEFAULTS.model_copy(update=images)
        self.operator.kill()

    @rule(number=st.integers(1, 6))
    def expire_watches(self, number: int) -> None:
        self.operator.faults.expired_watches = number
        self.operator.drop_watches()

    @rule()
    def drop_watches(self) -> None:
        self.operator.drop_watches()

    @rule()
    def silence_watches(self) -> None:
        self.operator.faults.are_watches_silent = True

    @rule()
    def settle(self) -> None:
        self.operator.faults.stop()
        deadline = time.monotonic() + DEADLINE_SECONDS
        for _ in range(MAX_SETTLE_ROUNDS):
            self.wait_until_settled(deadline)
            before, num_writes = self.versions(), len(self.writes)
            self.wait_for_reconcile(deadline)
            after, written = self.versions(), self.writes[num_writes:]
            if before == after and not written:
                break
        else:
            changed = sorted(str(key) for key in {**before, **after} if before.get(key) != after.get(key))
            pytest.fail(f"reconciles of a settled job still write: {[w[0] for w in written]}; changed: {changed}")
        self.check_preserved()
        self.check_writes()

    def proceed(self, hurry: bool = False) -> None:
        """Wait until the armed faults were injected, or everything settled; with `hurry` not at all."""
        if not hurry:
            self.wait_until_settled(time.monotonic() + DEADLINE_SECONDS, or_exhausted=True)

    def wait_until_settled(self, deadline: float, *, or_exhausted: bool = False) -> None:
        while why := self.describe_unsettled():
            if or_exhausted and self.operator.faults.are_exhausted:
                return
            if time.monotonic() > deadline:
                pytest.fail(f"did not settle in {DEADLINE_SECONDS:.0f} s: {why}\n{self.job()}")
            time.sleep(POLL_SECONDS)

    def wait_for_reconcile(self, deadline: float) -> None:
        """Wait for two reconciles per object and two rounds of LISTs: the first may have started before."""
        incarnation, num_resyncs = self.operator.num_resyncs
        num_reconciles = self.operator.num_reconciles + 2 * (self.has_job + self.has_model)
        while True:
            now, resyncs = self.operator.num_resyncs
            if self.operator.num_reconciles >= num_reconciles and now == incarnation and resyncs >= num_resyncs + 2:
                return
            if now != incarnation:
                incarnation, num_resyncs = now, 0
            assert time.monotonic() < deadline, "the operator reconciles no longer"
            time.sleep(POLL_SECONDS)

    def describe_unsettled(self) -> str:
        assert not self.operator.errors, self.operator.errors
        if self.simulator.step():
            return "the simulated controllers have work"
        children, pods = self.admin.children(), self.simulator.pods()
        of_job = {key: child for key, child in children.items() if not reward_oracle.is_of_model(key)}
        of_model = {key: child for key, child in children.items() if reward_oracle.is_of_model(key)}
        return self._describe_unsettled_job(of_job, pods) or self._describe_unsettled_model(of_model, pods)

    def _describe_unsettled_job(self, children: job_oracle.Objects, pods: list[Manifest]) -> str:
        job, foreign = self.job(), set(self.foreign)
        if not self.has_job:
            extra = set(children) - foreign
            return f"left over: {sorted(extra)}" if job or extra else ""
        if job is None:
            return "the job does not exist"
        stage = self.stage(job)
        job_pods = [pod for pod in pods if "rljob.dev/job" in pod["metadata"]["labels"]]
        wrong = [
            *job_oracle.find_wrong_children(job, stage, children, foreign),
            *job_oracle.find_wrong_status(job, stage, job_pods, foreign),
        ]
        return "; ".join(wrong)

    def _describe_unsettled_model(self, children: job_oracle.Objects, pods: list[Manifest]) -> str:
        model = self.model()
        if not self.has_model or model is None:
            is_settled = model is None and not self.has_model and not children
            return "" if is_settled else f"left over of the RewardModel: {sorted(children)}"
        return "; ".join(f"RewardModel: {wrong}" for wrong in reward_oracle.find_wrong(model, children, pods))

    def check_preserved(self) -> None:
        """Foreign objects are unchanged, and no child was recreated without need."""
        for key, created in self.foreign.items():
            assert self.admin.find(*key) == created, f"{key} belongs to another owner"
        exists = {False: self.has_job, True: self.has_model}
        children = {k: child for k, child in self.admin.children().items() if exists[reward_oracle.is_of_model(k)]}
        uids = {key: child["metadata"]["uid"] for key, child in children.items() if key[0] != "Job"}
        recreated = [key for key, uid in uids.items() if self.uids.get(key, uid) != uid and key not in self.disturbed]
        assert not recreated, f"recreated without need: {recreated}"
        self.uids, self.disturbed = uids, set()
        if self.has_job and not self.ended and self.stage(self.job()) == "Failed":
            self.ended = "Failed"  # its deadline has passed
            self.disturb_workloads()

    def check_writes(self) -> None:
        """Check every write since the last call."""
        INJECTED.update(self.operator.faults.injected)
        self.operator.faults.injected.clear()
        writes, self.writes[:] = self.writes[:], []
        for path, sent, answer in writes:
            if path.endswith("/status") and "/rljobs/" in path:
                self._check_job_status(sent, answer)
            elif path.endswith("/status"):
                _check_generation(sent, answer)
            elif "replicas" in sent.get("spec", {}):
                self._check_replicas(sent)

    def _check_replicas(self, sent: Manifest) -> None:
        """The replicas are those of some generation of the owner's spec."""
        (owner,) = sent["metadata"]["ownerReferences"]
        key = (sent["kind"], sent["metadata"]["name"])
        specs = [spec for (uid, _), spec in self.specs.items() if uid == owner["uid"]]
        if owner["kind"] == "RewardModel":
            desired = {spec["replicas"] for spec in specs}
        else:
            desired = {job_oracle.replicas_of({"metadata": {"name": JOB_NAME}, "spec": s}).get(key) for s in specs}
        assert sent["spec"]["replicas"] in desired, f"{key}: no spec had {sent['spec']['replicas']} replicas"

    def _check_job_status(self, sent: Manifest, answer: Manifest) -> None:
        status, generation = sent["status"], sent["status"]["observedGeneration"]
        current = _check_generation(sent, answer)
        spec = answer["spec"] if generation == current else self.specs.get((answer["metadata"]["uid"], generation))
        if spec is None or status["phase"] in ("Succeeded", "Failed"):
            return
        is_suspended = status["phase"] == "Suspended"
        wants = spec.get("suspend", False)
        assert is_suspended == wants, f"{status['phase']}, but its generation has suspend: {wants}"
        wanted = {role: 0 if is_suspended else desired for role, desired in job_oracle.desired_of(spec).items()}
        roles = {role["name"]: role["desired"] for role in status.get("roles") or []}
        assert roles in (wanted, {}), f"generation {generation} desires {wanted}, its status reports {roles}"

    def stage(self, job: Manifest) -> str:
        if self.ended:
            return self.ended
        spec, status = job["spec"], job.get("status") or {}
        if spec["rollout"].get("template") == reward_oracle.INVALID:
            return "Invalid"
        if spec.get("suspend"):
            return "Suspended"
        if seconds := spec.get("activeDeadlineSeconds"):
            age = status.get("activeSeconds", 0)
            if since := status.get("activeSince"):
                age += (self.operator.now() - datetime.fromisoformat(since)).total_seconds()
            return "Failed" if age > seconds else "Active"
        return "Active"

    def record_spec(self, stored: Manifest) -> None:
        self.specs[stored["metadata"]["uid"], stored["metadata"]["generation"]] = stored["spec"]

    def forget_job(self) -> None:
        self.has_job, self.ended, self.num_crashes, self.uids = False, "", 0, {}
        self.is_user_error = False

    def disturb_workloads(self) -> None:
        """Allow the workloads to be recreated."""
        self.disturbed |= {key for key in self.uids if key[0] in job_oracle.WORKLOADS}

    def delete(self, key: Key) -> None:
        self.disturbed.add(key)
        with ignore_status(404):
            self.admin.delete(*key)

    def patch(self, kind: str, name: str, change: Manifest) -> None:
        with ignore_status(404):
            self.admin.patch(kind, name, change)

    def job(self) -> Any:
        return self.admin.find("RLJob", JOB_NAME)

    def model(self) -> Any:
        return self.admin.find("RewardModel", "math")

    def versions(self) -> dict[Key, str]:
        owners = [owner for kind in ("RLJob", "RewardModel") for owner in self.admin.list(kind)]
        found = [*self.admin.children().values(), *self.simulator.pods(), *owners]
        events = self.admin.core.list_namespaced_event(self.namespace).items
        versions = {(o["kind"], o["metadata"]["name"]): o["metadata"]["resourceVersion"] for o in found}
        return versions | {("Event", e.metadata.name): e.metadata.resource_version for e in events}

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            self.operator.stop()
            self.admin.core.delete_namespace(self.namespace)


def _check_generation(sent: Manifest, answer: Manifest) -> int:
    """A status is of one generation that exists. Return the current one."""
    generation, current = sent["status"]["observedGeneration"], int(answer["metadata"]["generation"])
    assert generation <= current, f"a status is of generation {generation}, after {current}"
    reported = {condition["observedGeneration"] for condition in sent["status"]["conditions"]}
    assert reported <= {generation}, f"conditions are of {reported}, their status of {generation}"
    return current
