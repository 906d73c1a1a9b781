"""The whole operator against a real API server, on any bad day: run_operator with its watches, cache, queue and Lease.

A hypothesis machine edits a job and a RewardModel, deletes and tampers with children, puts foreign objects in their
places, plays Pods and moves the clock, while requests fail, watches end, fall silent or have expired, and the operator
dies after any write. When the faults stop, all must settle: the cluster is what the oracles' tables say (not plan()),
further looks write nothing, and no status has ever spoken of what its generation did not ask for.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import oracle
import pytest
import reward_oracle
from cluster_player import Player
from direct_backend import DirectBackend
from door import WRITE_FAULTS
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from kubernetes import client, dynamic
from machine_faults import FAULTS, LABELS, unless
from machine_models import MODEL_EDITS, MODEL_TAMPERINGS, RewardModelRules, check_model_status
from manifests import INLINE, MISSING, put, put_all, smallest
from operator_thread import OperatorThread

from rljob_api.wire.contract import ANNOTATION_RETRY

NAME = "lifted"
DEADLINE_SECONDS = 90.0
STILL_WINDOWS = 3
"""So often may something be written yet when all is as it should be: the last words of a status."""
HOUR_SECONDS = 3600
SECOND_REWARD = {"name": "style", "function": {"inline": INLINE}, "replicas": 2}
INVALID = {"bogus": 1}
EDITS: tuple[tuple[str, Any], ...] = (
    ("rollout.replicas", 3),
    ("rollout.replicas", 1),
    ("trainer.env", {"EXTRA": "1"}),
    ("schedule.steps", 200),
    ("rewards.0.replicas", 2),
    ("second reward", True),
    ("second reward", False),
    ("rollout.template", INVALID),
    ("rollout.template", {}),
    ("suspend", True),
    ("suspend", False),
    ("activeDeadlineSeconds", 1800),
    ("activeDeadlineSeconds", MISSING),
)
TAMPERINGS: tuple[tuple[str, Any], ...] = (
    ("ConfigMap", {"data": {"job.yaml": "tampered"}}),
    ("NetworkPolicy", {"spec": {"egress": [{}]}}),
    ("Deployment", {"spec": {"replicas": 9}}),
    ("StatefulSet", {"spec": {"replicas": 0}}),
    ("Service", {"metadata": {"labels": LABELS}}),
    ("Deployment", {"metadata": {"labels": LABELS}}),
    ("Secret", {"metadata": {"labels": {"rljob.dev/job": "another"}}}),
    ("StatefulSet", {"metadata": {"labels": {"rljob.dev/job": "another"}}}),
)
PLACES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ConfigMap", f"{NAME}-config", {"data": {"mine": "yes"}}),
    ("Service", f"{NAME}-head", {"spec": {"ports": [{"port": 80}]}}),
    ("PodDisruptionBudget", f"{NAME}-rollout", {"spec": {"minAvailable": 1}}),
)
STRUCK: Counter[str] = Counter()
"""What really struck, in all examples."""


class OperatorMachine(RewardModelRules):
    api: dynamic.DynamicClient
    kubeconfig: str
    address: str

    def __init__(self) -> None:
        super().__init__()
        self.namespace = f"whole-{uuid.uuid4().hex[:8]}"
        core = client.CoreV1Api(self.api.client)
        core.create_namespace({"metadata": {"name": self.namespace}})
        core.create_namespaced_service_account(self.namespace, {"metadata": {"name": "default"}})
        self.world = DirectBackend(self.api)  # the test's own hands: they pass no door
        self.player = Player(self.world, self.namespace)
        self.writes: list[tuple[str, Any, Any]] = []
        self.operator = OperatorThread(
            self.kubeconfig, self.namespace, self.address, lambda *write: self.writes.append(write)
        )
        self.has_job, self.ended, self.num_crashes, self.num_retries = False, "", 0, 0
        self.has_model = False
        self.ttl: int | None = None
        self.is_users_mistake = False
        """A changed spec undoes that end."""
        self.foreign: dict[oracle.Key, dict[str, Any]] = {}
        self.specs: dict[tuple[str, int], Any] = {}
        self.uids: dict[oracle.Key, str] = {}
        self.disturbed: set[oracle.Key] = set()
        self.operator.start()

    # What users do.
    @precondition(lambda self: not self.has_job)
    @rule(faults=FAULTS, ttl=st.sampled_from([None, 600]))
    def create_the_job(self, faults: Any, ttl: int | None) -> None:
        self.settle()  # an earlier one may be leaving
        self.operator.faults.arm(*faults)
        self.ttl = ttl
        self.create()
        self.go_on()

    @precondition(lambda self: self.has_job)
    @rule(edit=st.sampled_from(EDITS), faults=FAULTS, hurry=st.booleans())
    def edit_the_spec(self, edit: Any, faults: Any, hurry: bool) -> None:
        self.operator.faults.arm(*faults)
        self.edit(edit)
        self.go_on(hurry)

    @precondition(lambda self: self.has_job)
    @rule(faults=FAULTS, how=st.sampled_from(["Background", "Foreground", "and again", "and again"]))
    def delete_the_job(self, faults: Any, how: str) -> None:
        self.operator.faults.arm(*faults)
        policy = "Foreground" if how == "Foreground" else "Background"
        call = self.world.resource("RLJob").delete
        call(name=NAME, namespace=self.namespace, body={"propagationPolicy": policy})
        self.forget_job()
        if how == "and again":
            self.create()
        self.go_on()

    @precondition(lambda self: self.has_job)
    @rule(index=st.integers(0, 30), faults=FAULTS, hurry=st.booleans())
    def delete_a_child(self, index: int, faults: Any, hurry: bool) -> None:
        self.operator.faults.arm(*faults)
        keys = sorted(key for key in set(self.children()) - set(self.foreign) if not reward_oracle.is_models(key))
        if keys:
            self.remove(keys[index % len(keys)])
        self.go_on(hurry)

    @precondition(lambda self: self.has_job)
    @rule(tampering=st.sampled_from(TAMPERINGS), faults=FAULTS, hurry=st.booleans())
    def tamper_with_children(self, tampering: Any, faults: Any, hurry: bool) -> None:
        self.operator.faults.arm(*faults)
        kind, change = tampering
        for found, name in sorted(set(self.children()) - set(self.foreign)):
            is_same = found == kind and not reward_oracle.is_models((found, name))
            if is_same and not (kind == "ConfigMap" and name != f"{NAME}-config"):
                self.patch(kind, name, change)
        self.go_on(hurry)

    @precondition(lambda self: self.has_job and not self.foreign)
    @rule(place=st.sampled_from(PLACES), faults=FAULTS)
    def take_a_childs_name(self, place: Any, faults: Any) -> None:
        self.operator.faults.arm(*faults)
        kind, name, content = place
        body = {"apiVersion": self.world.resource(kind).group_version, "kind": kind, "metadata": {"name": name}}
        for _ in range(10):  # the operator may be quicker
            self.remove((kind, name))
            with unless(409):
                made = self.world.resource(kind).create(body=body | content, namespace=self.namespace)
                self.foreign[kind, name] = made.to_dict()
                break
        self.go_on()

    @precondition(lambda self: self.foreign)
    @rule(faults=FAULTS)
    def give_the_name_back(self, faults: Any) -> None:
        self.operator.faults.arm(*faults)
        (kind, name), _ = self.foreign.popitem()
        self.world.resource(kind).delete(name=name, namespace=self.namespace)
        self.disturbed.add((kind, name))
        self.go_on()

    @precondition(lambda self: self.has_job and self.ended == "Failed")
    @rule(faults=FAULTS)
    def retry_the_job(self, faults: Any) -> None:
        self.settle()
        self.operator.faults.arm(*faults)
        self.num_retries += 1
        self.patch("RLJob", NAME, {"metadata": {"annotations": {ANNOTATION_RETRY: str(self.num_retries)}}})
        self.ended, self.is_users_mistake = "", False
        self.disturb_workloads()
        self.go_on()
        self.settle()

    # What the cluster does.
    @rule(faults=FAULTS)
    def all_pods_get_ready(self, faults: Any) -> None:
        self.player.play()
        self.operator.faults.arm(*faults)
        for pod in self.player.pods():
            self.player.set_ready(pod)
        self.go_on()

    @precondition(lambda self: self.has_job and self.num_crashes < 5)
    @rule(index=st.integers(0, 9), how=st.sampled_from(["crash", "oom"]), faults=FAULTS)
    def a_pod_crashes(self, index: int, how: str, faults: Any) -> None:
        self.operator.faults.arm(*faults)
        if pods := self.job_pods():
            self.num_crashes += 1
            self.player.end(pods[index % len(pods)], how)
        self.go_on()

    @precondition(lambda self: self.has_job and not self.foreign and not self.ended)
    @rule(index=st.integers(0, 9), ends_well=st.booleans(), faults=FAULTS)
    def the_job_ends(self, index: int, ends_well: bool, faults: Any) -> None:
        """By the head's success, or by a mistake of the user's that a Pod has found."""
        self.settle()
        if self.stage(self.job()) != "Active":
            return
        self.operator.faults.arm(*faults)
        if ends_well:
            self.player.complete(self.children()["Job", f"{NAME}-head"])
        else:
            pods = self.job_pods()
            self.player.end(pods[index % len(pods)], "user error")
        self.ended, self.is_users_mistake = "Succeeded" if ends_well else "Failed", not ends_well
        self.disturb_workloads()
        self.go_on()
        self.settle()

    @rule(faults=FAULTS)
    def an_hour_passes(self, faults: Any) -> None:
        self.settle()
        self.operator.faults.arm(*faults)
        self.operator.move_clock(HOUR_SECONDS)
        if self.has_job and self.ended and self.ttl is not None:
            self.forget_job()  # its time is over
        self.go_on()
        self.settle()

    # What strikes the operator itself.
    @rule()
    def the_operator_is_killed(self) -> None:
        self.operator.kill()

    @rule(number=st.integers(1, 6))
    def watches_have_expired(self, number: int) -> None:
        self.operator.faults.expired_watches = number
        self.operator.drop_watches()

    @rule()
    def watches_end(self) -> None:
        self.operator.drop_watches()

    @rule()
    def watches_fall_silent(self) -> None:
        self.operator.faults.are_watches_silent = True

    # How it settles, and what must hold then.
    @rule()
    def settle(self) -> None:
        self.operator.faults.stop()
        deadline = time.monotonic() + DEADLINE_SECONDS
        for _ in range(STILL_WINDOWS):
            self.wait(deadline)
            before, num_writes = self.versions(), len(self.writes)
            self.wait_for_a_look(deadline)
            after, written = self.versions(), self.writes[num_writes:]
            if before == after and not written:
                break
        else:
            changed = sorted(str(key) for key in {**before, **after} if before.get(key) != after.get(key))
            pytest.fail(f"looks at a settled job still write: {[w[0] for w in written]}, which changes {changed}")
        self.check_what_stays()
        self.check_writes()

    def wait(self, deadline: float, *, or_struck: bool = False) -> None:
        """Until all is as it should be, or, when asked, until the armed faults have struck."""
        while why := self.why_unsettled():
            if or_struck and self.operator.faults.are_over:
                return
            if time.monotonic() > deadline:
                pytest.fail(f"did not settle in {DEADLINE_SECONDS:.0f} s: {why}\n{self.job()}")
            time.sleep(0.1)  # between looks at the condition

    def go_on(self, hurry: bool = False) -> None:
        if not hurry:
            self.wait(time.monotonic() + DEADLINE_SECONDS, or_struck=True)

    def why_unsettled(self) -> str:
        assert not self.operator.errors, self.operator.errors
        if self.player.play():
            return "the controllers have work"
        return self.why_job_is_unsettled() or self.why_model_is_unsettled()

    def why_job_is_unsettled(self) -> str:
        job, foreign = self.job(), set(self.foreign)
        children = {key: child for key, child in self.children().items() if not reward_oracle.is_models(key)}
        if not self.has_job:
            return f"left over: {sorted(set(children) - foreign)}" if job or set(children) - foreign else ""
        if job is None:
            return "the job is gone"
        stage = self.stage(job)
        wrong = [
            *oracle.find_wrong_children(job, stage, children, foreign),
            *oracle.find_wrong_status(job, stage, self.job_pods(), foreign),
        ]
        return "; ".join(wrong)

    def stage(self, job: Any) -> str:
        if self.ended:
            return self.ended
        spec, started = job["spec"], (job.get("status") or {}).get("startTime")
        if spec["rollout"].get("template") == INVALID:
            return "Invalid"
        if spec["suspend"]:
            return "Suspended"
        if (seconds := spec.get("activeDeadlineSeconds")) and started:
            age = self.operator.now().timestamp() - time.mktime(time.strptime(started, "%Y-%m-%dT%H:%M:%SZ"))
            return "Failed" if age + time.timezone > seconds else "Active"
        return "Active"

    def wait_for_a_look(self, deadline: float) -> None:
        """A whole one, and a whole LIST of everything. The first that ends may have begun before, so two must."""
        incarnation, num_resyncs = self.operator.num_resyncs
        num_looks = self.operator.num_looks
        while True:
            now, resyncs = self.operator.num_resyncs
            has_looked = self.operator.num_looks >= num_looks + 2 * (self.has_job + self.has_model)
            if has_looked and now == incarnation and resyncs >= num_resyncs + 2:
                return
            if now != incarnation:
                incarnation, num_resyncs = now, 0
            assert time.monotonic() < deadline, "the operator looks no more"
            time.sleep(0.1)  # between looks at the condition

    def check_what_stays(self) -> None:
        for key, made in self.foreign.items():
            assert self.world.find(key[0], self.namespace, key[1]) == made, f"{key} is someone else's"
        has = {False: self.has_job, True: self.has_model}
        children = {key: child for key, child in self.children().items() if has[reward_oracle.is_models(key)]}
        uids = {key: child["metadata"]["uid"] for key, child in children.items() if key[0] != "Job"}
        anew = [key for key, uid in uids.items() if self.uids.get(key, uid) != uid and key not in self.disturbed]
        assert not anew, f"made anew without need: {anew}"
        self.uids, self.disturbed = uids, set()
        if self.has_job and not self.ended and self.stage(self.job()) == "Failed":
            self.ended = "Failed"  # its time was over
            self.disturb_workloads()

    def check_writes(self) -> None:
        """What must hold of every write, however bad the day."""
        STRUCK.update(self.operator.faults.struck)
        self.operator.faults.struck.clear()
        writes, self.writes[:] = self.writes[:], []
        for path, sent, answer in writes:
            if path.endswith("/status") and "/rljobs/" in path:
                self.check_status(sent, answer)
            elif path.endswith("/status"):
                check_model_status(sent, answer)
            elif "replicas" in sent.get("spec", {}):
                (owner,) = sent["metadata"]["ownerReferences"]
                key, asked = (sent["kind"], sent["metadata"]["name"]), set()
                for (of, _), spec in self.specs.items():
                    if of == owner["uid"] and owner["kind"] == "RewardModel":
                        asked.add(spec["replicas"])
                    elif of == owner["uid"]:
                        asked.add(oracle.replicas_of({"metadata": {"name": NAME}, "spec": spec}).get(key))
                assert sent["spec"]["replicas"] in asked, f"{key}: nobody asked for {sent['spec']['replicas']} replicas"

    def check_status(self, sent: Any, answer: Any) -> None:
        status, generation = sent["status"], sent["status"]["observedGeneration"]
        uid, current = answer["metadata"]["uid"], answer["metadata"]["generation"]
        assert generation <= current, f"a status speaks of generation {generation}, to come after {current}"
        said = {condition["observedGeneration"] for condition in status["conditions"]}
        assert said <= {generation}, f"conditions speak of {said}, the status of {generation}"
        spec = answer["spec"] if generation == current else self.specs.get((uid, generation))
        if spec is None or status["phase"] in ("Succeeded", "Failed"):
            return
        is_suspended = status["phase"] == "Suspended"
        assert is_suspended == spec["suspend"], f"{status['phase']}, and suspend is {spec['suspend']} in its generation"
        wanted = {role: 0 if is_suspended else desired for role, desired in oracle.desired_of(spec).items()}
        roles = {role["name"]: role["desired"] for role in status.get("roles") or []}
        assert roles in (wanted, {}), f"generation {generation} wants {wanted}, its status says {roles}"

    # Hands and eyes.
    def create(self) -> None:
        manifest = smallest(name=NAME)
        if self.ttl is not None:
            manifest = put_all(manifest, {"ttlSecondsAfterFinished": self.ttl})
        self.note_spec(self.world.resource("RLJob").create(body=manifest, namespace=self.namespace))
        self.has_job = True

    def edit(self, edit: tuple[str, Any]) -> None:
        (path, value), was_ended = edit, self.ended
        for _ in range(20):  # the operator's status may come between
            stored = self.job()
            if stored is None or (value is MISSING and path not in stored["spec"]):
                return
            if path == "second reward":
                path, value = "rewards", [stored["spec"]["rewards"][0], *([SECOND_REWARD] if value else [])]
            changed = put(stored, path, value)
            with unless(409):
                answer = self.world.resource("RLJob").replace(body=changed, namespace=self.namespace)
                self.note_spec(answer)
                made = answer.to_dict()
                if made["metadata"]["generation"] > stored["metadata"]["generation"] and self.is_users_mistake:
                    self.ended, self.is_users_mistake = "", False
                break
        if edit == ("suspend", True) or was_ended:
            self.disturb_workloads()
        if edit == ("second reward", False):
            self.disturbed |= {(kind, f"{NAME}-reward-style") for kind in oracle.KINDS}

    def note_spec(self, answer: Any) -> None:
        stored = answer.to_dict()
        self.specs[stored["metadata"]["uid"], stored["metadata"]["generation"]] = stored["spec"]

    def forget_job(self) -> None:
        self.has_job, self.ended, self.num_crashes, self.uids = False, "", 0, {}
        self.is_users_mistake = False

    def disturb_workloads(self) -> None:
        """They will be made anew."""
        self.disturbed |= {key for key in self.uids if key[0] in oracle.WORKING}

    def remove(self, key: oracle.Key) -> None:
        self.disturbed.add(key)
        body = {"propagationPolicy": "Background"}
        with unless(404):
            self.world.resource(key[0]).delete(name=key[1], namespace=self.namespace, body=body)

    def patch(self, kind: str, name: str, change: Any) -> None:
        call = self.world.resource(kind).patch
        with unless(404):
            call(name=name, body=change, namespace=self.namespace, content_type="application/merge-patch+json")

    def job(self) -> Any:
        return self.world.find("RLJob", self.namespace, NAME)

    def job_pods(self) -> list[Any]:
        return [pod for pod in self.player.pods() if "rljob.dev/job" in pod["metadata"]["labels"]]

    def children(self) -> oracle.Objects:
        """All objects of the operator's kinds, labelled or not."""
        found = [o for kind in oracle.KINDS for o in self.world.list(kind, self.namespace)]
        return {(o["kind"], o["metadata"]["name"]): o for o in found if o["metadata"]["name"] != "kube-root-ca.crt"}

    def versions(self) -> dict[oracle.Key, str]:
        owners = [owner for kind in ("RLJob", "RewardModel") for owner in self.world.list(kind, self.namespace)]
        found = [*self.children().values(), *self.player.pods(), *owners]
        events = client.CoreV1Api(self.api.client).list_namespaced_event(self.namespace).items
        versions = {(o["kind"], o["metadata"]["name"]): o["metadata"]["resourceVersion"] for o in found}
        return versions | {("Event", e.metadata.name): e.metadata.resource_version for e in events}

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            self.operator.stop()
            client.CoreV1Api(self.api.client).delete_namespace(self.namespace)


@pytest.fixture
def machine(api_client, crds, control_plane):
    """The machine, of which each one has an operator and a namespace of its own."""
    OperatorMachine.api = dynamic.DynamicClient(api_client)
    OperatorMachine.kubeconfig = str(Path(control_plane.kubeconfig))
    OperatorMachine.address = control_plane.address
    return OperatorMachine


def test_each_rule_of_a_reward_model_converges_under_faults(machine):
    """In a fixed order: a few random examples may leave a rule out."""
    world = machine()
    try:
        world.create_the_model(({2: "409", 5: "death after"}, {1: "410"}), 3)
        world.settle()
        world.all_pods_get_ready(({1: "lost"}, {}))
        world.settle()
        for number, edit in enumerate(MODEL_EDITS):
            world.edit_the_model(edit, ({1: WRITE_FAULTS[number]}, {}), False)
            world.settle()
        world.scale_the_model(4, ({1: "cut"}, {}), False)
        for tampering in MODEL_TAMPERINGS:
            world.tamper_with_the_models_children(tampering, ({2: "503"}, {}), False)
        world.settle()
        world.delete_the_model(({1: "death before"}, {}), and_again=True)
        world.settle()
        world.delete_the_model(({}, {}), and_again=False)
    finally:
        world.teardown()


def test_the_whole_operator_converges_whatever_happens(machine):
    options = settings(
        max_examples=int(os.environ.get("RLJOB_MACHINE_EXAMPLES", "4")),
        stateful_step_count=14,
        deadline=None,
        derandomize="RLJOB_MACHINE_EXAMPLES" not in os.environ,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    STRUCK.clear()
    run_state_machine_as_test(machine, settings=options)
    assert sum(STRUCK.values()) >= 10, f"few faults have struck, so this says little: {STRUCK}"
