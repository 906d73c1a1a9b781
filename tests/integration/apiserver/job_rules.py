"""What users do to a job and its children, and what the cluster does to its Pods, in the operator's state machine."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from rljob_api.wire.contract import ANNOTATION_RETRY
from tests.integration.apiserver import job_oracle, reward_oracle
from tests.integration.apiserver.admin_client import API_VERSIONS
from tests.integration.apiserver.manifests import INLINE, MISSING, put, put_all, smallest
from tests.integration.apiserver.operator_machine import (
    FAULTS,
    FOREIGN_LABELS,
    JOB_NAME,
    OperatorMachineCore,
    ignore_status,
)

SECOND_REWARD = {"name": "style", "function": {"inline": INLINE}, "replicas": 2}
EDITS: tuple[tuple[str, Any], ...] = (
    ("rollout.replicas", 3),
    ("rollout.replicas", 1),
    ("trainer.env", {"EXTRA": "1"}),
    ("schedule.steps", 200),
    ("rewards.0.replicas", 2),
    ("rewards.0.resources", {"requests": {"cpu": "0.5", "memory": "1Gi"}}),
    ("second reward", True),
    ("second reward", False),
    ("rollout.template", reward_oracle.INVALID),
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
    ("Service", {"metadata": {"labels": FOREIGN_LABELS}}),
    ("Deployment", {"metadata": {"labels": FOREIGN_LABELS}}),
    ("Secret", {"metadata": {"labels": {"rljob.dev/job": "another"}}}),
    ("StatefulSet", {"metadata": {"labels": {"rljob.dev/job": "another"}}}),
)
TRAINERS = ("StatefulSet", f"{JOB_NAME}-trainer")
"""Recreated when their configuration changes, and after an upgrade also with the head."""
FOREIGN_OBJECTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ConfigMap", f"{JOB_NAME}-config", {"data": {"mine": "yes"}}),
    ("Service", f"{JOB_NAME}-head", {"spec": {"ports": [{"port": 80}]}}),
    ("PodDisruptionBudget", f"{JOB_NAME}-head", {"spec": {"minAvailable": 1}}),
)


class JobRules(OperatorMachineCore):
    @precondition(lambda self: not self.has_job)
    @rule(faults=FAULTS, ttl=st.sampled_from([None, 600]))
    def create_the_job(self, faults: Any, ttl: int | None) -> None:
        self.settle()  # an earlier job may be terminating
        self.operator.faults.arm(*faults)
        self.ttl = ttl
        self._create()
        self.proceed()

    @precondition(lambda self: self.has_job)
    @rule(edit=st.sampled_from(EDITS), faults=FAULTS, hurry=st.booleans())
    def edit_the_spec(self, edit: Any, faults: Any, hurry: bool) -> None:
        self.operator.faults.arm(*faults)
        self._edit(edit)
        self.proceed(hurry)

    @precondition(lambda self: self.has_job)
    @rule(faults=FAULTS, how=st.sampled_from(["Background", "Foreground", "recreate", "recreate"]))
    def delete_the_job(self, faults: Any, how: str) -> None:
        self.operator.faults.arm(*faults)
        self.admin.delete("RLJob", JOB_NAME, "Foreground" if how == "Foreground" else "Background")
        self.forget_job()
        if how == "recreate":
            self._create()
        self.proceed()

    @precondition(lambda self: self.has_job)
    @rule(index=st.integers(0, 30), faults=FAULTS, hurry=st.booleans())
    def delete_a_child(self, index: int, faults: Any, hurry: bool) -> None:
        self.operator.faults.arm(*faults)
        if keys := self._child_keys():
            self.delete(keys[index % len(keys)])
            self.disturbed.add(TRAINERS)  # a head that is created again, or a new token
        self.proceed(hurry)

    @precondition(lambda self: self.has_job)
    @rule(tampering=st.sampled_from(TAMPERINGS), faults=FAULTS, hurry=st.booleans())
    def tamper_with_children(self, tampering: Any, faults: Any, hurry: bool) -> None:
        self.operator.faults.arm(*faults)
        kind, change = tampering
        for found, name in self._child_keys():
            if found == kind and not (kind == "ConfigMap" and name != f"{JOB_NAME}-config"):
                self.patch(kind, name, change)
        self.proceed(hurry)

    @precondition(lambda self: self.has_job and not self.foreign)
    @rule(foreign=st.sampled_from(FOREIGN_OBJECTS), faults=FAULTS)
    def create_a_foreign_object(self, foreign: Any, faults: Any) -> None:
        self.operator.faults.arm(*faults)
        kind, name, content = foreign
        body = {"apiVersion": API_VERSIONS[kind], "kind": kind, "metadata": {"name": name}} | content
        for _ in range(10):  # the operator may be faster
            self.delete((kind, name))
            with ignore_status(409):
                self.foreign[kind, name] = self.admin.create(body)
                break
        self.proceed()

    @precondition(lambda self: self.foreign)
    @rule(faults=FAULTS)
    def delete_the_foreign_object(self, faults: Any) -> None:
        self.operator.faults.arm(*faults)
        key, _ = self.foreign.popitem()
        self.delete(key)
        self.proceed()

    @precondition(lambda self: self.has_job and self.ended == "Failed")
    @rule(faults=FAULTS)
    def retry_the_job(self, faults: Any) -> None:
        self.settle()
        self.operator.faults.arm(*faults)
        self.num_retries += 1
        self.patch("RLJob", JOB_NAME, {"metadata": {"annotations": {ANNOTATION_RETRY: str(self.num_retries)}}})
        self.ended, self.is_user_error = "", False
        self.disturb_workloads()
        self.proceed()
        self.settle()

    @rule(faults=FAULTS)
    def make_all_pods_ready(self, faults: Any) -> None:
        self.simulator.step()
        self.operator.faults.arm(*faults)
        for pod in self.simulator.pods():
            self.simulator.set_ready(pod)
        self.proceed()

    @precondition(lambda self: self.has_job and self.num_crashes < 5)
    @rule(index=st.integers(0, 9), how=st.sampled_from(["crash", "oom"]), faults=FAULTS)
    def crash_a_pod(self, index: int, how: str, faults: Any) -> None:
        self.operator.faults.arm(*faults)
        if pods := self._job_pods():
            self.num_crashes += 1
            self.simulator.fail(pods[index % len(pods)], how)
        self.proceed()

    @precondition(lambda self: self.has_job and not self.foreign and not self.ended)
    @rule(index=st.integers(0, 9), succeeds=st.booleans(), faults=FAULTS)
    def end_the_job(self, index: int, succeeds: bool, faults: Any) -> None:
        """By the head's success, or by a user error in a Pod."""
        self.settle()
        if self.stage(self.job()) != "Active":
            return
        self.operator.faults.arm(*faults)
        if succeeds:
            self.simulator.complete(self.admin.children()["Job", f"{JOB_NAME}-head"])
        else:
            pods = self._job_pods()
            self.simulator.fail(pods[index % len(pods)], "user error")
        self.ended, self.is_user_error = "Succeeded" if succeeds else "Failed", not succeeds
        self.disturb_workloads()
        self.proceed()
        self.settle()

    @rule(seconds=st.sampled_from([60, 3600, 3600]), faults=FAULTS)
    def pass_time(self, seconds: int, faults: Any) -> None:
        self.settle()
        self.operator.faults.arm(*faults)
        self.operator.move_clock(seconds)
        if self.has_job and self.ended and self.ttl is not None and seconds > self.ttl:
            self.forget_job()
        self.proceed()
        self.settle()

    def _create(self) -> None:
        manifest = smallest(name=JOB_NAME)
        if self.ttl is not None:
            manifest = put_all(manifest, {"ttlSecondsAfterFinished": self.ttl})
        self.record_spec(self.admin.create(manifest))
        self.has_job = True

    def _edit(self, edit: tuple[str, Any]) -> None:
        (path, value), was_ended = edit, self.ended
        for _ in range(20):  # the operator may write the status meanwhile
            stored = self.job()
            if stored is None or (value is MISSING and path not in stored["spec"]):
                return
            if path == "second reward":
                path, value = "rewards", [stored["spec"]["rewards"][0], *([SECOND_REWARD] if value else [])]
            with ignore_status(409):
                changed = self.admin.replace(put(stored, path, value))
                self.record_spec(changed)
                if changed["metadata"]["generation"] > stored["metadata"]["generation"] and self.is_user_error:
                    self.ended, self.is_user_error = "", False
                break
        if edit == ("suspend", True) or was_ended:
            self.disturb_workloads()
        if edit[0] in ("trainer.env", "second reward"):
            self.disturbed.add(TRAINERS)
        if edit == ("second reward", False):
            self.disturbed |= {(kind, f"{JOB_NAME}-reward-style") for kind in job_oracle.KINDS}

    def _child_keys(self) -> list[job_oracle.Key]:
        return sorted(k for k in set(self.admin.children()) - set(self.foreign) if not reward_oracle.is_of_model(k))

    def _job_pods(self) -> list[Any]:
        return [pod for pod in self.simulator.pods() if "rljob.dev/job" in pod["metadata"]["labels"]]
