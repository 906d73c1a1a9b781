"""GPUs and Pods that trainer and rollouts share: what each phase adds up."""

from memory_plan.cases import QWEN25_1B5

from rljob_inputs.memory import roles
from rljob_inputs.memory.plan import plan_memory
from tests.unit.rljob_inputs.memory.test_plan import ask, find

GIB = 2**30
PARAMETERS = 1_543_714_304


def shared(*, gpu_gib=80, rollout=None, **trainer):
    rollout = {"placement": "trainer", "gpusPerReplica": 1, "maxModelLen": 1536, **(rollout or {})}
    return ask(QWEN25_1B5, gpu_gib=gpu_gib, rollout=rollout, trainer={"gpusPerReplica": 1, **trainer})


def phases(need):
    return {moment.name: {part.name: part.num_bytes for part in moment.parts} for moment in need.moments}


def test_a_gpu_has_the_awake_side_and_what_the_other_one_cannot_free():
    need = find(shared(), "trainer", "gpu")
    found = phases(need)
    assert list(found) == ["generate", "update", "publish"]
    assert found["generate"]["freed trainer"] == roles.FREED_BYTES
    assert found["generate"]["weights"] == 2 * PARAMETERS
    assert "state" not in found["generate"]
    for phase in ("update", "publish"):
        assert found[phase]["sleeping rollout"] == roles.ASLEEP_BYTES
        assert found[phase]["state"] == 12 * PARAMETERS
        assert "weights" not in found[phase]
    assert "gradients" not in found["publish"], "they are freed with the update"
    assert found["publish"]["gathered weights"] == 2 * PARAMETERS
    assert need.peak.name == "generate", "the cache takes what vLLM may use"
    assert need.num_bytes == int(0.8 * 80 * GIB) + roles.FREED_BYTES


def test_the_rollouts_add_no_gpus_and_no_pods():
    needs = plan_memory(shared())
    found = [(need.role, need.resource, need.count, need.is_shared) for need in needs if need.role != "reward r"]
    assert found == [
        ("head", "host", 1, False),
        ("trainer", "gpu", 1, False),
        ("trainer", "host", 1, False),
        ("rollout", "gpu", 1, True),
    ]
    assert find(shared(), "rollout", "gpu").available == int(0.8 * 80 * GIB)


def test_each_gpu_of_the_trainer_has_a_part_of_one_engine():
    question = shared(gpusPerReplica=4, rollout={"gpusPerReplica": 2})
    need = find(question, "trainer", "gpu")
    assert (need.count, find(question, "rollout", "gpu").count) == (4, 4)
    assert phases(need)["generate"]["weights"] == PARAMETERS
    host = phases(find(question, "trainer"))["publish"]
    assert host["rollouts"] == 2 * roles.ENGINE_BYTES
    assert host["pinned state"] == 12 * PARAMETERS, "of the four ranks of the Pod"


def test_a_pod_keeps_the_pinned_copies_and_the_engines_read_its_file():
    found = phases(find(shared(), "trainer"))
    assert "pinned state" not in found["load"], "nothing was freed before the first step"
    assert found["publish"]["pinned state"] == 12 * PARAMETERS
    assert found["publish"]["scratch"] == 3 * 2 * PARAMETERS, "the files of the publisher, and no other"
    assert "weights of rollouts" not in found["publish"]


def test_engines_keep_the_base_weights_while_they_sleep_if_adapters_are_published():
    lora = shared(lora={"rank": 32, "publish": "adapter"})
    assert phases(find(lora, "trainer"))["publish"]["weights of rollouts"] == 2 * PARAMETERS
    merged = shared(lora={"rank": 32, "publish": "merged"})
    assert "weights of rollouts" not in phases(find(merged, "trainer"))["publish"]


def test_what_is_offloaded_has_no_second_copy():
    found = phases(find(shared(offload="all"), "trainer"))
    assert "pinned state" not in found["publish"]
    assert found["publish"]["state"] == 12 * PARAMETERS


def test_without_gpus_the_state_stays_while_the_engine_is_awake():
    rollout = {"placement": "trainer", "maxModelLen": 1536, "kvCacheMemory": "1Gi"}
    found = phases(find(ask(QWEN25_1B5, rollout=rollout), "trainer"))
    assert found["generate"]["state"] == 12 * PARAMETERS
    assert found["generate"]["rollout"] == roles.ENGINE_BYTES + 2 * PARAMETERS + GIB
    assert found["update"]["rollouts"] == roles.ENGINE_BYTES
    assert {need.role for need in plan_memory(ask(QWEN25_1B5, rollout=rollout))} == {"head", "trainer", "reward r"}


def reward_model(*, gpu_gib=80, **changes):
    """One GPU for the trainer, the rollouts, and the model of a reward."""
    model = {"source": "/m", "placement": "trainer", "gpusPerReplica": 1, "label": 0, "maxModelLen": 1536, **changes}
    gpus = {"gpusPerReplica": model["gpusPerReplica"]}
    rollout = {"placement": "trainer", "maxModelLen": 1536, **gpus}
    rewards = [{"name": "rm", "model": model}]
    return ask(QWEN25_1B5, gpu_gib=gpu_gib, trainer=gpus, rollout=rollout, rewards=rewards)


def test_model_of_a_reward_is_awake_with_the_rollouts_and_sleeps_with_them():
    question = reward_model()
    need = find(question, "trainer", "gpu")
    found = phases(need)
    assert found["generate"]["vLLM of reward rm"] == int(0.2 * 80 * GIB)
    assert need.num_bytes == int(0.6 * 80 * GIB) + int(0.2 * 80 * GIB) + roles.FREED_BYTES
    assert found["update"]["sleeping reward rm"] == roles.ASLEEP_BYTES
    assert phases(find(question, "trainer"))["publish"]["weights of reward rm"] == 2 * PARAMETERS
    vllm = find(question, "reward rm vllm", "gpu")
    assert (vllm.count, vllm.available, vllm.is_shared) == (1, int(0.2 * 80 * GIB), True)
    assert sum(need.count for need in plan_memory(question) if need.resource == "gpu" and not need.is_shared) == 1


def test_model_that_needs_more_than_the_rollouts_leave_does_not_fit():
    assert find(reward_model(), "trainer", "gpu").fits
    large = reward_model(gpu_gib=24)
    assert find(large, "reward rm vllm", "gpu").fits is False, "a fifth of 24 GiB"


def test_model_without_gpus_is_a_part_of_the_trainers_pod():
    question = reward_model(gpusPerReplica=0, kvCacheMemory="1Gi")
    found = phases(find(question, "trainer"))
    weights = 2 * PARAMETERS
    assert found["generate"]["vLLM of reward rm"] == weights + GIB + roles.ENGINE_BYTES
    assert found["update"]["weights of reward rm"] == weights
    assert not [need for need in plan_memory(question) if need.role == "reward rm vllm"]
