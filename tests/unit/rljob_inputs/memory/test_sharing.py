"""How a job runs on fewer GPUs than it asks for, or why it does not."""

from dataclasses import replace

import pytest
from memory_plan.cases import QWEN25_1B5

from rljob_inputs.memory.gpus import count_all_gpus
from rljob_inputs.memory.sharing import share_gpus
from tests.unit.rljob_inputs.memory.test_plan import ask, find

ONE_EACH = {"trainer": {"gpusPerReplica": 1}, "rollout": {"gpusPerReplica": 1, "maxModelLen": 1536}}
LORA = {"gpusPerReplica": 1, "lora": {"rank": 32}}


def ask_with(num_gpus, *, gpu_gib=24, prompt=512, **spec):
    return replace(ask(QWEN25_1B5, gpu_gib=gpu_gib, prompt=prompt, **(ONE_EACH | spec)), num_gpus=num_gpus)


@pytest.mark.parametrize(("gib", "trainer"), [(24, LORA), (48, ONE_EACH["trainer"]), (80, ONE_EACH["trainer"])])
def test_one_gpu_is_shared_if_both_fit(gib, trainer):
    question = ask_with(1, gpu_gib=gib, trainer=trainer)
    sharing = share_gpus(question)
    assert (dict(sharing.fields), sharing.removed, sharing.reason) == ({"rollout.placement": "trainer"}, (), "")
    changed = sharing.apply(question.job)
    assert changed.spec.shares_trainer
    assert find(replace(question, job=changed), "trainer", "gpu").fits


def test_fields_of_pods_that_no_longer_exist_are_removed():
    rollout = {
        **ONE_EACH["rollout"],
        "replicas": 4,
        "resources": {"limits": {"memory": "16Gi"}},
        "nodePool": {"nodeSelector": {"pool": "a"}},
    }
    question = ask_with(4, gpu_gib=80, trainer={"gpusPerReplica": 4}, rollout=rollout)
    sharing = share_gpus(question)
    assert sharing.removed == ("rollout.replicas", "rollout.resources", "rollout.nodePool")
    assert sharing.apply(question.job).spec.engines_per_pod == 4


def reward_model(**changes):
    """A job whose reward has a model with a GPU of its own."""
    model = {"source": "/m", "gpusPerReplica": 1, "label": 0, "maxModelLen": 1536, **changes}
    return {"rewards": [{"name": "rm", "model": model}]}


def test_model_of_a_reward_shares_if_the_gpus_of_the_rollouts_do_not_suffice():
    given = reward_model(gpuMemoryUtilization=0.9, resources={"limits": {"memory": "16Gi"}})
    question = ask_with(1, gpu_gib=80, **given)
    sharing = share_gpus(question)
    assert sharing.fields == {"rollout.placement": "trainer", "rewards[0].model.placement": "trainer"}
    assert sharing.removed == ("rewards[0].model.resources", "rewards[0].model.gpuMemoryUtilization")
    changed = sharing.apply(question.job)
    assert [*changed.spec.models_in_trainer] == ["spec.rewards[0].model"]
    assert count_all_gpus(changed.spec) == 1
    assert find(replace(question, job=changed), "trainer", "gpu").fits


def test_model_of_a_reward_keeps_its_gpu_if_there_is_one():
    assert share_gpus(ask_with(2, gpu_gib=80, **reward_model())).fields == {"rollout.placement": "trainer"}


def test_model_joins_rollouts_that_share_already():
    rollout = {**ONE_EACH["rollout"], "placement": "trainer"}
    sharing = share_gpus(ask_with(1, gpu_gib=80, rollout=rollout, **reward_model()))
    assert sharing.fields == {"rollout.placement": "trainer", "rewards[0].model.placement": "trainer"}


def test_model_that_cannot_share_has_a_reason():
    sharing = share_gpus(ask_with(1, gpu_gib=80, **reward_model(gpusPerReplica=2)))
    assert sharing.reason == "rewards[0].model.gpusPerReplica 2 does not divide trainer.gpusPerReplica 1"
    assert share_gpus(ask_with(1, **reward_model())).reason == "all do not fit"


def test_enough_gpus_change_nothing():
    question = ask_with(2)
    sharing = share_gpus(question)
    assert (sharing.fields, sharing.reason) == ({}, "")
    assert sharing.apply(question.job) is question.job


def test_vllm_gets_less_if_that_is_all_that_it_takes():
    rollout = {**ONE_EACH["rollout"], "gpuMemoryUtilization": 0.99}
    sharing = share_gpus(ask_with(1, trainer=LORA, rollout=rollout))
    assert sharing.fields["rollout.gpuMemoryUtilization"] == 0.9


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schedule": {"type": "bounded"}}, "schedule.type bounded generates while the trainer updates; set onPolicy"),
        ({"trainer": {"gpusPerReplica": 2}}, "even without GPUs of the rollouts, the job requests 2"),
        ({"rollout": {"gpusPerReplica": 2}}, "rollout.gpusPerReplica 2 does not divide trainer.gpusPerReplica 1"),
        ({"rollout": {"gpusPerReplica": 1, "env": {"A": "b"}}}, "rollout.env is set, and the rollouts would run in "),
        ({"gpu_gib": None}, "the memory of the GPUs is unknown"),
    ],
)
def test_what_cannot_be_shared_has_a_reason(changes, reason):
    sharing = share_gpus(ask_with(1, **changes))
    assert not sharing.fields
    assert sharing.reason.startswith(reason)


def test_an_unknown_model_is_a_reason():
    sharing = share_gpus(replace(ask_with(1), models={}))
    assert sharing.reason == "the model's shape is unknown, so whether both fit is, too"


def test_what_does_not_fit_is_the_reason():
    sharing = share_gpus(ask_with(1))
    assert sharing.reason == "both do not fit"
    assert sharing.misfit.role == "trainer"
