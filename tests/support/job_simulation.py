"""A small job, and a simulation that applies its plans: for unit tests of the operator."""

from datetime import UTC, datetime, timedelta

import yaml

from rljob_api.manifest.job import RLJob
from rljob_core.backend import ObservedState, key_of
from rljob_core.children import WORKLOAD_KINDS
from rljob_core.children.difference import contains, stamp
from rljob_core.defaults import DEFAULTS
from rljob_core.plan.job import plan_job

START = datetime(2026, 1, 1, tzinfo=UTC)
FUNCTION = {"inline": "def reward(): ..."}


def make_job(**spec):
    """The job gsm8k with a function reward named correct. `spec` replaces fields of its spec."""
    base = {
        "model": {"source": "/models/tiny"},
        "data": {"train": {"source": "/data/train.jsonl"}},
        "rewards": [{"name": "correct", "function": FUNCTION}],
    }
    return RLJob.model_validate({"metadata": {"name": "gsm8k", "uid": "u1", "generation": 1}, "spec": base | spec})


def make_agent_job(user=None, tool=None, **spec):
    """The job with a simulated user, and a tool named calculator."""
    agent = {
        "type": "loop",
        "user": {"function": {"inline": "def respond(): ..."}} | (user or {}),
        "tools": [{"name": "calculator", "function": {"inline": "def add(): ..."}} | (tool or {})],
    }
    data = {"train": {"source": "/data/train.jsonl"}, "format": "chat"}
    return make_job(**{"data": data, "agent": agent} | spec)


def make_program_job(runner=None, models=(), **spec):
    """The job without rewards, with a program that a runner runs."""
    agent = {"type": "program", "runner": {"function": {"inline": "def run(): ..."}} | (runner or {})}
    agent["models"] = list(models)
    data = {"train": {"source": "/data/train.jsonl"}, "format": "chat"}
    return make_job(**{"data": data, "agent": agent, "rewards": []} | spec)


def make_service_job(service=None, **spec):
    """The job as a training service."""
    return make_job(**{"data": None, "rewards": [], "service": service or {}} | spec)


class JobSimulation:
    """Applies the plans of a job to its objects, stores its status, and counts the writes of each reconcile."""

    def __init__(self, job, *, deletes_pods=False):
        self.job, self.now, self.children, self.pods = job, START, {}, {}
        self.driver, self.driver_problem, self.events, self.writes = None, "", [], 0
        self.defaults, self.policy = DEFAULTS, None
        self._deletes_pods = deletes_pods

    def reconcile(self, seconds=1, **pods):
        self.pods |= pods
        self.now += timedelta(seconds=seconds)
        alive = tuple(pod for pod in self.pods.values() if pod)
        observed = ObservedState(self.children, alive, self.driver, self.driver_problem, policy=self.policy)
        made = plan_job(self.job, observed, self.now, defaults=self.defaults, new_token=lambda: "t")
        self.writes = sum(not contains(self.children.get(key_of(c)), stamp(c)) for c in made.children)
        self.writes += len(made.delete) + len(made.ungate) + (made.status != self.job.status)
        for child in map(stamp, made.children):
            old = self.children.get(key_of(child), {})
            self.children[key_of(child)] = child | ({"status": old["status"]} if "status" in old else {})
        self.children = {key: child for key, child in self.children.items() if key not in made.delete}
        if self._deletes_pods and not self.has_workloads():
            self.pods.clear()
        for name in made.ungate:
            self.pods[name] = self.pods[name] | {"spec": {}}
        self.job = self.job.model_copy(update={"status": made.status})
        self.events += made.events
        return made

    def has_workloads(self):
        return any(key.kind in WORKLOAD_KINDS for key in self.children)


def describe_job(steps):
    """The text of a job's file."""
    spec = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t.jsonl"}},
        "rewards": [{"name": "r", "function": {"inline": "def reward(): ..."}}],
        "schedule": {"steps": steps},
    }
    return yaml.safe_dump(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": spec}
    )
