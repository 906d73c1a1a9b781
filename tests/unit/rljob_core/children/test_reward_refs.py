"""References of a job to RewardModels."""

import json

import yaml

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.wire.contract import ENV_REWARD_TOKENS
from rljob_core.backend import ChildKey, ObservedState
from rljob_core.children import reward_refs
from tests.paths import ROOT

DATA = ROOT / "tests" / "data" / "plan"


def make_job():
    document = yaml.safe_load(next(iter(sorted(DATA.glob("*/job.yaml")))).read_text())
    names = ("ours", "theirs", "gone")
    document["spec"]["rewards"] = [{"name": n, "rewardModelRef": {"name": f"model-{n}"}} for n in names]
    return RLJob.model_validate(document)


def make_model(name, spec):
    return RewardModel.model_validate({"metadata": {"name": name, "namespace": "ns"}, "spec": spec})


MODELS = {
    "model-ours": make_model("model-ours", {"function": {"inline": "def score(sample): return 1.0\n"}}),
    "model-theirs": make_model("model-theirs", {"http": {"url": "http://judge:1/score"}, "timeoutSeconds": 7}),
}


def test_workloads_wait_for_a_missing_model():
    desired = [{"kind": kind, "metadata": {"name": "a"}} for kind in ("Service", "Job")]
    present = MODELS | {"model-gone": MODELS["model-ours"]}
    for models, frozen in ((MODELS, {ChildKey("Job", "a")}), (present, set())):
        observed = ObservedState(reward_models=models)
        assert reward_refs.find_frozen_children(make_job(), observed, desired, head_exists=False) == frozen


def test_http_model_gives_the_driver_its_url_and_timeout():
    rewards = reward_refs.resolve_http(make_job(), MODELS).spec.rewards
    theirs = RLJob.model_validate(make_job().model_dump(by_alias=True)).spec.rewards[1]
    assert theirs.reward_model_ref is not None, "the job itself stays unchanged"
    assert (rewards[1].http.url, rewards[1].timeout_seconds) == ("http://judge:1/score", 7)
    assert rewards[1].reward_model_ref is None
    assert rewards[0].reward_model_ref is not None


def test_model_scope_applies_to_the_job():
    """The driver sends requests by scope, and the model's server rejects others."""
    model = make_model("model-ours", {"function": {"inline": "class Both: ...\n"}, "scope": "sampleThenGroup"})
    rewards = reward_refs.resolve_http(make_job(), {"model-ours": model}).spec.rewards
    assert [reward.scope for reward in rewards] == ["sampleThenGroup", "sample", "sample"]


def test_served_model_gives_the_head_its_service_and_token():
    assert reward_refs.build_services(make_job(), MODELS) == {"ours": "model-ours-rewardmodel"}
    token, names = reward_refs.build_token_env(make_job(), MODELS)
    assert token["valueFrom"]["secretKeyRef"]["name"] == "model-ours-rewardmodel"
    assert (names["name"], json.loads(names["value"])) == (ENV_REWARD_TOKENS, {"ours": token["name"]})
