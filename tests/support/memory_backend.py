"""A small API server in memory for reconciles: its calls fail, and others change its objects."""

import copy
from datetime import UTC, datetime

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_core.backend import ChildKey, JobKey, ObservedState, RewardModelKey, key_of
from rljob_core.children import WORKLOAD_KINDS

KEY = JobKey("default", "gsm8k")
MODEL_KEY = RewardModelKey("default", "math")
START = datetime(2026, 1, 1, tzinfo=UTC)
NUM_CHILDREN = 14
"""How many the job of `make_job` has."""


def make_job(**spec):
    return RLJob.model_validate(
        {
            "metadata": {"name": "gsm8k", "uid": "u1", "generation": 1},
            "spec": {
                "model": {"source": "/models/tiny"},
                "data": {"train": {"source": "/data/train.jsonl"}},
                "rewards": [reward("correct")],
            }
            | spec,
        }
    )


def make_model(**spec):
    metadata = {"name": "math", "uid": "u2", "generation": 1}
    return RewardModel.model_validate({"metadata": metadata, "spec": {"function": {"inline": "x"}} | spec})


def reward(name, source="def reward(): ..."):
    return {"name": name, "function": {"inline": source}, "resources": {"requests": {"cpu": "0.5"}}}


OWNERS = pytest.mark.parametrize(("owner", "key"), [(make_job(), KEY), (make_model(), MODEL_KEY)])


class MemoryBackend:
    """Server-side apply for one manager, immutable fields, defaults, owner references, and calls that fail."""

    def __init__(self, owner):
        self.owner, self.objects, self.applied, self.pods = owner, {}, {}, {}
        self.events, self.writes, self.version = [], [], 0
        self.fail_at, self.fail_after_write = None, False
        self.errors = {}
        """The error that the apply of a kind raises."""
        self.checks, self.pod_errors, self.missing = [], {}, {}
        """The checked workloads; the error of the Pod of a workload; what the Pods of a workload miss."""

    async def get_owner(self, key):
        self._call()
        return self.owner.model_copy(deep=True) if self.owner and key.name == self.owner.metadata.name else None

    async def observe(self, owner):
        self._call()
        return ObservedState(copy.deepcopy(self.objects), tuple(copy.deepcopy(list(self.pods.values()))))

    async def apply(self, manifest):
        key = key_of(manifest)
        with self._write(f"apply {key.kind} {key.name}"):
            old = self.objects.get(key)
            new = _merged(_without(old or {}, self.applied.get(key, {}), manifest), manifest)
            self._admit(key, old, new)
            self.applied[key], self.objects[key] = copy.deepcopy(manifest), _defaulted(new)
            if self.objects[key] != old:
                self.version += 1

    async def find_missing(self, workloads):
        self._call()
        return [self.missing.get(key_of(workload).name, ()) for workload in workloads]

    async def check(self, workload):
        self._call()
        key = key_of(workload)
        self.checks.append(key)
        if error := self.errors.get(key.kind) or self.pod_errors.get(key.name):
            raise error

    async def delete(self, namespace, child):
        with self._write(f"delete {child.kind} {child.name}"):
            self.remove(child)

    async def delete_job(self, key):
        with self._write("delete the job"):
            self.owner = None

    async def force_delete(self, namespace, pod):
        with self._write(f"force delete {pod}"):
            if error := self.errors.get("Pod"):
                raise error
            self.pods.pop(pod, None)

    async def update_status(self, owner, status):
        with self._write("status"):
            assert owner.metadata.uid == self.owner.metadata.uid
            stored = type(status).model_validate(status.to_manifest())
            self.owner = self.owner.model_copy(update={"status": stored})

    async def record_event(self, owner, event):
        self.events.append(event)

    def remove(self, child):
        self.objects.pop(child, None)
        self.applied.pop(child, None)
        self.pods = {name: pod for name, pod in self.pods.items() if pod["owner"] != child}

    def _admit(self, key, old, new):
        if error := self.errors.get(key.kind):
            raise error
        if old and key.kind == "Job" and old["spec"]["template"] != new["spec"]["template"]:
            raise UserError("spec.template: field is immutable")
        if old and key.kind == "Secret" and old["data"] != new["data"]:
            raise UserError("data: field is immutable when `immutable` is set")
        if sum(ref.get("controller", False) for ref in new["metadata"]["ownerReferences"]) > 1:
            raise UserError("Only one reference can have Controller set to true")

    def _call(self):
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                raise TransientError("the API server does not answer")

    def _write(self, what):
        backend = self

        class Write:
            """Fails before or after the write: the operator cannot know which."""

            def __enter__(self):
                self.lost = False
                try:
                    backend._call()
                except TransientError:
                    if not backend.fail_after_write:
                        raise
                    self.lost = True

            def __exit__(self, kind, value, traceback):
                if kind is None:
                    backend.writes.append(what)
                    if self.lost:
                        raise TransientError("the answer was lost")

        return Write()


def _merged(old, new):
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _merged(old.get(name), value) for name, value in new.items()}
    return copy.deepcopy(new)


def _without(old, before, now):
    """Remove what this manager applied before and leaves out now."""
    if not isinstance(old, dict) or not isinstance(before, dict):
        return old
    removed = set(before) - set(now)
    return {n: _without(v, before.get(n), now.get(n, {})) for n, v in old.items() if n not in removed}


def _defaulted(manifest):
    """Add some defaults of an API server, and format quantities as it does."""
    manifest = copy.deepcopy(manifest)
    manifest["metadata"].setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
    for container in manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
        container.setdefault("imagePullPolicy", "IfNotPresent")
        requests = container["resources"].get("requests", {})
        requests.update({"cpu": "500m"} if requests.get("cpu") == "0.5" else {})
    if not manifest.get("spec", {}).get("egress", True):
        del manifest["spec"]["egress"]
    return manifest


def workloads_of(backend):
    return sorted(key.name for key in backend.objects if key.kind in WORKLOAD_KINDS)


def make_running(backend):
    """Every Pod of the job is ready."""
    for role, kind in {"head": "Job", "trainer": "StatefulSet", "rollout": "Deployment"}.items():
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        metadata = {"name": role, "labels": {"rljob.dev/job": "gsm8k", "rljob.dev/role": role}}
        owner = ChildKey(kind, f"gsm8k-{role}")
        backend.pods[role] = {"metadata": metadata, "spec": {}, "status": ready, "owner": owner}
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": "reward", "rljob.dev/reward": "correct"}
    owner = ChildKey("Deployment", "gsm8k-reward-correct")
    backend.pods["reward"] = {
        "metadata": {"name": "reward", "labels": labels},
        "spec": {},
        "status": ready,
        "owner": owner,
    }


def edit(backend, **spec):
    """Change the spec of the job."""
    manifest = backend.owner.model_dump(mode="json", by_alias=True)
    for name, change in spec.items():
        manifest["spec"][name] = manifest["spec"].get(name, {}) | change
    manifest["metadata"]["generation"] += 1
    backend.owner = RLJob.model_validate(manifest)
