"""A RewardModel's children, status and the order of the I/O."""

from datetime import UTC, datetime

from rljob_api.contract import LABEL_REWARD_MODEL
from rljob_api.reward import RewardModel
from rljob_operator.backend import ChildKey, JobKey, Observed, key_of
from rljob_operator.reward_model import plan_reward_model, reconcile_reward_model

NOW = datetime(2026, 1, 2, tzinfo=UTC)
FUNCTION = {"function": {"inline": "def score(sample):\n    return 1.0\n"}, "replicas": 2}


def make_model(spec=FUNCTION):
    metadata = {"name": "judge", "namespace": "ns", "uid": "u", "generation": 3}
    return RewardModel.model_validate({"metadata": metadata, "spec": spec})


def make_observed(model, ready):
    children = {key_of(c): c for c in plan_reward_model(model, Observed(), NOW, new_token=lambda: "t").children}
    children[ChildKey("Deployment", "judge-rewardmodel")]["status"] = {"replicas": 2, "readyReplicas": ready}
    return Observed(children=children)


def holds(status):
    return {condition.type: (condition.status, condition.reason) for condition in status.conditions}


def test_a_function_has_all_its_children_owned_and_labelled():
    children = plan_reward_model(make_model(), Observed(), NOW).children
    kinds = ["Secret", "ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment"]
    assert [child["kind"] for child in children] == kinds
    assert {child["metadata"]["labels"][LABEL_REWARD_MODEL] for child in children} == {"judge"}
    assert {child["metadata"]["ownerReferences"][0]["kind"] for child in children} == {"RewardModel"}


def test_the_token_is_made_once_and_kept():
    model = make_model()
    first = make_observed(model, 2)
    again = plan_reward_model(model, first, NOW, new_token=lambda: "another")
    secret = next(child for child in again.children if child["kind"] == "Secret")
    assert secret["data"] == first.children[ChildKey("Secret", "judge-rewardmodel")]["data"]


def test_some_ready_pods_serve_but_are_degraded():
    status = plan_reward_model(make_model(), make_observed(make_model(), 1), NOW).status
    assert holds(status) == {"Ready": ("True", "Serving"), "Degraded": ("True", "TooFewReady")}
    assert (status.replicas, status.ready_replicas, status.observed_generation) == (2, 1, 3)


def test_an_http_model_is_ready_and_takes_back_the_children_it_had():
    wanted = plan_reward_model(make_model({"http": {"url": "http://x"}}), make_observed(make_model(), 2), NOW)
    assert (wanted.children, len(wanted.delete)) == ((), 6)
    assert holds(wanted.status)["Ready"] == ("True", "External")


class Backend:
    def __init__(self, model):
        self.model, self.children, self.writes = model, {}, []

    async def get_reward_model(self, key):
        return self.model

    async def observe_reward_model(self, model):
        return Observed(children=dict(self.children))

    async def apply(self, manifest):
        self.children[key_of(manifest)] = manifest
        self.writes.append(manifest["kind"])

    async def delete(self, namespace, child):
        self.writes.append(child)

    async def update_reward_model_status(self, model, status):
        self.model = model.model_copy(update={"status": status})
        self.writes.append("status")

    async def record_event(self, about, event):
        self.writes.append(event.reason)


async def test_a_second_look_at_an_equal_world_writes_nothing():
    backend = Backend(make_model())
    await reconcile_reward_model(backend, JobKey("ns", "judge"), NOW)
    assert "status" in backend.writes
    backend.writes.clear()
    await reconcile_reward_model(backend, JobKey("ns", "judge"), NOW)
    assert backend.writes == []
