"""The reconcile core against a real API server, through edits, crashes of the operator, and failing writes.

A hypothesis machine edits jobs, deletes and edits children, puts foreign objects in their places and plays the Pods;
writes fail, get lost, conflict, or are the operator's last. After each step everything settles, and then: the cluster
is what plan() says, another look writes nothing, no child is left over, and no status speaks of a generation to come.
"""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cluster_player import Player
from direct_backend import CHILD_KINDS, DirectBackend, Killed, is_ours
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from kubernetes import client, dynamic
from manifests import put, smallest

from rljob_api.errors import TransientError
from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import LABEL_JOB
from rljob_operator.backend import JobKey, key_of
from rljob_operator.loop.reconcile import reconcile
from rljob_operator.plan.difference import contains, stamp
from rljob_operator.plan.job import plan

NAME = "lifted"
FAULTS = st.dictionaries(st.integers(1, 14), st.sampled_from(["fail", "lost", "conflict", "kill"]), max_size=3)
MOST_ROUNDS = 60
"""Far more looks than any disturbance here needs to be over."""
EDITS = (
    ("rollout.replicas", 3),
    ("rollout.replicas", 1),
    ("rewards.0.replicas", 2),
    ("rewards.0.resources", {"requests": {"cpu": "0.5", "memory": "1Gi"}}),
    ("trainer.env", {"EXTRA": "1"}),
    ("schedule.steps", 200),
    ("suspend", True),
    ("suspend", False),
)


class ReconcileMachine(RuleBasedStateMachine):
    api: dynamic.DynamicClient

    def __init__(self) -> None:
        super().__init__()
        self.namespace = f"machine-{uuid.uuid4().hex[:8]}"
        self.world = DirectBackend(self.api)  # the test's own hands: no faults
        core = client.CoreV1Api(self.api.client)
        core.create_namespace({"metadata": {"name": self.namespace}})
        core.create_namespaced_service_account(self.namespace, {"metadata": {"name": "default"}})
        self.player = Player(self.world, self.namespace)
        self.key = JobKey(self.namespace, NAME)
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.foreign: dict[tuple[str, str], dict[str, Any]] = {}
        self.settled = True

    # What users do.
    @precondition(lambda self: self.job() is None)
    @rule(faults=FAULTS)
    def create_the_job(self, faults: dict[int, str]) -> None:
        manifest = smallest(name=NAME)
        self.world.resource("RLJob").create(body=manifest, namespace=self.namespace)
        self.settle(faults)

    @precondition(lambda self: self.job() is not None)
    @rule(edit=st.sampled_from(EDITS), faults=FAULTS)
    def edit_the_spec(self, edit: tuple[str, Any], faults: dict[int, str]) -> None:
        stored = self.world.find("RLJob", *self.key)
        assert stored is not None
        self.world.resource("RLJob").replace(body=put(stored, *edit), namespace=self.namespace)
        self.settle(faults)

    @precondition(lambda self: self.job() is not None)
    @rule(faults=FAULTS, again=st.booleans())
    def delete_the_job(self, faults: dict[int, str], again: bool) -> None:
        self.world.resource("RLJob").delete(name=NAME, namespace=self.namespace)
        if again:  # before the garbage collector came
            self.world.resource("RLJob").create(body=smallest(name=NAME), namespace=self.namespace)
        self.settle(faults)

    @precondition(lambda self: self.children())
    @rule(pick=st.randoms(use_true_random=False), faults=FAULTS)
    def delete_a_child(self, pick: Any, faults: dict[int, str]) -> None:
        child = pick.choice(self.children())
        self.remove(child)
        self.settle(faults)

    @precondition(lambda self: self.children())
    @rule(pick=st.randoms(use_true_random=False), faults=FAULTS)
    def edit_a_child(self, pick: Any, faults: dict[int, str]) -> None:
        child = pick.choice(
            [c for c in self.children() if c["kind"] in ("Service", "Deployment", "ConfigMap")] or [None]
        )
        if child is None:
            return
        body = {"metadata": {"name": child["metadata"]["name"], "labels": {"app.kubernetes.io/managed-by": "someone"}}}
        call = self.world.resource(child["kind"]).patch
        call(body=body, namespace=self.namespace, content_type="application/merge-patch+json")
        self.settle(faults)

    @precondition(lambda self: self.children() and not self.foreign)
    @rule(pick=st.randoms(use_true_random=False), faults=FAULTS)
    def put_a_foreign_object_in_a_childs_place(self, pick: Any, faults: dict[int, str]) -> None:
        places = [c for c in self.children() if c["kind"] in ("ConfigMap", "Service")]
        if not places:
            return
        child = pick.choice(places)
        self.remove(child)
        body = {"apiVersion": "v1", "kind": child["kind"], "metadata": {"name": child["metadata"]["name"]}}
        body |= {"data": {"mine": "yes"}} if child["kind"] == "ConfigMap" else {"spec": {"ports": [{"port": 80}]}}
        made = self.world.resource(child["kind"]).create(body=body, namespace=self.namespace).to_dict()
        self.foreign[child["kind"], child["metadata"]["name"]] = made
        self.settle(faults)

    @precondition(lambda self: self.foreign)
    @rule(faults=FAULTS)
    def remove_the_foreign_object(self, faults: dict[int, str]) -> None:
        (kind, name), _ = self.foreign.popitem()
        self.world.resource(kind).delete(name=name, namespace=self.namespace)
        self.settle(faults)

    # What the cluster does.
    @precondition(lambda self: self.player.pods())
    @rule(faults=FAULTS)
    def all_pods_get_ready(self, faults: dict[int, str]) -> None:
        for pod in self.player.pods():
            self.player.set_ready(pod)
        self.settle(faults)

    @precondition(lambda self: self.player.pods())
    @rule(
        pick=st.randoms(use_true_random=False),
        how=st.sampled_from(["crash", "crash", "oom", "user error"]),
        faults=FAULTS,
    )
    def a_pod_ends(self, pick: Any, how: str, faults: dict[int, str]) -> None:
        self.player.end(pick.choice(self.player.pods()), how)
        self.settle(faults)

    @precondition(lambda self: any(c["kind"] == "Job" and not c["status"].get("conditions") for c in self.children()))
    @rule(faults=FAULTS)
    def the_head_completes(self, faults: dict[int, str]) -> None:
        self.player.complete(next(c for c in self.children() if c["kind"] == "Job"))
        self.settle(faults)

    @rule(seconds=st.sampled_from([1, 60, 3600]), faults=FAULTS)
    def time_passes(self, seconds: int, faults: dict[int, str]) -> None:
        self.now += timedelta(seconds=seconds)
        self.settle(faults)

    # How it settles.
    def settle(self, faults: dict[int, str]) -> None:
        """Look, play and look again until nobody has anything to do. A killed operator begins anew."""
        backend = DirectBackend(self.api, dict(faults))
        for _ in range(MOST_ROUNDS):
            before = len(backend.writes)
            failed = False
            try:
                asyncio.run(reconcile(backend, self.key, self.now))
            except TransientError:
                failed = True
            except Killed:
                left = {number - len(backend.writes): fault for number, fault in backend._faults.items()}
                backend, before, failed = DirectBackend(self.api, left), 0, True
            self.check_status()
            played = self.player.play()
            if not failed and not played and len(backend.writes) == before:
                return
        pytest.fail(f"did not settle in {MOST_ROUNDS} rounds; the last writes were {backend.writes[-8:]}")

    # What must hold then.
    @invariant()
    def the_cluster_is_what_the_plan_says(self) -> None:
        job = self.job()
        if job is None:
            assert self.children() == [], "children outlive their job"
            return
        observed = asyncio.run(self.world.observe(job))
        wanted = plan(job, observed, self.now)
        assert not wanted.delete, f"left over: {wanted.delete}"
        for child in map(stamp, wanted.children):
            if tuple(key_of(child)) not in self.foreign:
                assert contains(observed.children.get(key_of(child)), child), f"{key_of(child)} is not as planned"
        if not self.foreign:
            assert wanted.status == job.status
        assert job.status.observed_generation == job.metadata.generation
        stray = [key for key, child in observed.children.items() if not is_ours(job, child)]
        assert not stray, f"labelled ours, owned by nobody alive: {stray}"

    @invariant()
    def another_look_writes_nothing(self) -> None:
        before, backend = self.versions(), DirectBackend(self.api)
        asyncio.run(reconcile(backend, self.key, self.now))
        assert backend.writes == []
        assert self.versions() == before

    @invariant()
    def there_are_never_more_pods_than_were_asked_for(self) -> None:
        job, count = self.job(), len(self.player.pods())
        spec = job.spec if job and not job.spec.suspend else None
        most = 1 + spec.trainer.replicas + spec.rollout.replicas + sum(r.replicas for r in spec.rewards) if spec else 0
        assert count <= most

    @invariant()
    def a_foreign_object_is_as_its_owner_left_it(self) -> None:
        for (kind, name), made in self.foreign.items():
            assert self.world.find(kind, self.namespace, name) == made

    def check_status(self) -> None:
        job = self.job()
        if job is not None:
            ahead = [c.type for c in job.status.conditions if c.observed_generation > job.metadata.generation]
            assert not ahead, f"conditions speak of a generation to come: {ahead}"
            assert job.status.observed_generation <= job.metadata.generation

    def job(self) -> RLJob | None:
        return asyncio.run(self.world.get_job(self.key))

    def children(self) -> list[dict[str, Any]]:
        selector = f"{LABEL_JOB}={NAME}"
        return [c for kind in CHILD_KINDS for c in self.world.list(kind, self.namespace, selector)]

    def versions(self) -> dict[tuple[str, str], str]:
        kinds = (*CHILD_KINDS, "Pod", "RLJob")
        found = [o for kind in kinds for o in self.world.list(kind, self.namespace)]
        return {tuple(key_of(o)): o["metadata"]["resourceVersion"] for o in found}  # type: ignore[misc]

    def remove(self, child: dict[str, Any]) -> None:
        body = {"propagationPolicy": "Background"}
        self.world.resource(child["kind"]).delete(name=child["metadata"]["name"], namespace=self.namespace, body=body)

    def teardown(self) -> None:
        client.CoreV1Api(self.api.client).delete_namespace(self.namespace)


def test_the_core_converges_whatever_happens(api_client, crds):
    ReconcileMachine.api = dynamic.DynamicClient(api_client)
    options = settings(
        max_examples=3,
        stateful_step_count=10,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    run_state_machine_as_test(ReconcileMachine, settings=options)
