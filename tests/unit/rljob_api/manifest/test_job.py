from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rljob_api.manifest.job import RLJobSpec


def build(**fields: Any) -> RLJobSpec:
    reward = {"name": "r", "function": {"file": "r.py"}}
    required = {"model": {"source": "m"}, "data": {"train": {"source": "d"}}, "rewards": [reward]}
    return RLJobSpec.model_validate({**required, **fields})


SHARED: dict[str, Any] = {"placement": "trainer"}


def in_trainer(**changes: Any) -> dict[str, Any]:
    """Return a reward whose model runs in the trainer's Pods."""
    return {"name": "rm", "model": {"source": "/m", "placement": "trainer", **changes}}


IN_TRAINER = in_trainer()
ONE_GPU: dict[str, Any] = {
    "trainer": {"gpusPerReplica": 1},
    "rollout": SHARED | {"gpusPerReplica": 1},
    "rewards": [in_trainer(gpusPerReplica=1)],
}

TRAINING_ALONE = {"name": "x", "function": {"file": "x"}, "use": "training"}

SCORED_DEATH = {"name": "r", "function": {"file": "r.py"}, "failurePolicy": {"scores": {"workerDied": 0}}}
SERVICE: dict[str, Any] = {"data": None, "rewards": [], "service": {}}
GIVEN: dict[str, Any] = {"warmStart": {"source": "g"}}
GIVEN_ALONE: dict[str, Any] = {"data": GIVEN, "rewards": [], "schedule": {"steps": 5, "warmStart": {"steps": 5}}}
ACCEPTED: list[dict[str, Any]] = [
    {},
    GIVEN_ALONE,
    {"rewards": [TRAINING_ALONE]},
    {"rewards": [SCORED_DEATH]},
    {"rollout": SHARED},
    SERVICE,
    SERVICE | {"trainer": {"replicas": 3}},
    {"rollout": SHARED, "schedule": {"type": "synchronous"}, "trainer": {"replicas": 2}, "suspend": True},
    {"rollout": SHARED | {"gpusPerReplica": 2}, "trainer": {"gpusPerReplica": 4}},
    {"rollout": SHARED | {"kvCacheMemory": "64Mi", "maxModelLen": 64, "extraArgs": ["--x"], "backoffLimit": 3}},
    {"schedule": {"promptsPerStep": 6, "miniBatches": 3}, "algorithm": {"groupSize": 4}, "trainer": {"replicas": 8}},
    {"rollout": {"replicas": 0}, "suspend": True},
    {"rollout": {"maxModelLen": 64, "sampling": {"maxTokens": 63}}},
    {"rollout": {"maxModelLen": 64}, "evaluation": {"sampling": {}}},
    {"model": {"source": "/m", "chatTemplate": {"inline": "{{ messages }}"}}},
    {"data": {"train": {"source": "d"}, "chatTemplateArguments": {"enable_thinking": False, "effort": "low"}}},
    {"rewards": [{"name": "x", "http": {"url": "https://x"}, "replicas": 0}]},
    {"evaluation": {"everySteps": 1}, "data": {"train": {"source": "d"}, "eval": {"source": "e"}}},
    {"rewards": [{"name": "penalty", "function": {"file": "x"}, "weight": -1}]},
    {"rewards": [{"name": n, "function": {"file": "x"}, "weight": w} for n, w in (("logged", 0), ("counts", 1))]},
    {"algorithm": {"type": "gspo", "loss": {"clipLow": 3e-3, "clipHigh": 4e-3}}},
    {
        "trainer": {"headDtype": "float32"},
        "rollout": {"extraArgs": ["--hf-overrides", '{"head_dtype": "float32", "rope_theta": 1e6}']},
    },
    {"trainer": {"headDtype": "model"}, "rollout": {"extraArgs": ["--hf-overrides", "{}"]}},
    {"algorithm": {"correction": {"level": "geometric", "type": "mask", "rejection": {"level": "token", "cap": 2}}}},
    {"evaluation": {"sampling": {"topP": 0.9, "topK": 20}}},
    {"trainer": {"lora": {}}},
    {"trainer": {"lora": {"rank": 8, "alpha": 16, "targetModules": ["q_proj", "v_proj"], "publish": "adapter"}}},
    {"rewards": [{"name": "x", "function": {"file": "x"}, "env": {"RLJOB_REWARD_DISABLE_ISOLATION": "landlock"}}]},
    {"data": {"train": {"source": "hf://a/b"}, "template": "{question} Put the answer in \\boxed{}."}},
]

VIOLATIONS: list[tuple[dict[str, Any], str]] = [
    ({"schedule": {"promptsPerStep": 8, "miniBatches": 3}}, "miniBatches must divide"),
    ({"schedule": {"promptsPerStep": 2}, "algorithm": {"groupSize": 3}, "trainer": {"replicas": 4}}, "trainer ranks"),
    ({"schedule": {"promptsPerStep": 2}, "algorithm": {"groupSize": 3}, "trainer": {"gpusPerReplica": 4}}, "ranks"),
    ({"rollout": {"replicas": 0}}, "unless the job is suspended"),
    ({"rewards": [{"name": "x", "function": {"file": "x"}, "replicas": 0}]}, "at least 1 replica each"),
    ({"rewards": [{"name": "x", "function": {"file": "x"}}] * 2}, "different names"),
    ({"rewards": [{"name": n, "function": {"file": "x"}, "weight": 0} for n in "ab"]}, "weight other than 0"),
    ({"schedule": {"maxStepsWithoutSignal": -1}}, "greater than or equal to 0"),
    ({"schedule": {"type": "bounded", "maxStaleness": 0}}, "greater than or equal to 1"),
    ({"schedule": {"type": "oneStepOff", "maxStaleness": 1}}, "is for type bounded alone, got 1"),
    (
        {"head": {"backoffLimit": 9, "backoffWindowSeconds": 5999}},
        r"must be at least 600 x \(backoffLimit \+ 1\): .*, got 5999",
    ),
    ({"rollout": {"maxModelLen": 64, "sampling": {"maxTokens": 64}}}, "leave room for the prompt"),
    (
        {"rollout": {"maxModelLen": 100}, "data": {"train": {"source": "d"}, "maxPromptTokens": 100}},
        "leave room for the prompt",
    ),
    (
        {"rollout": {"maxModelLen": 64, "sampling": {"maxTokens": 9}}, "evaluation": {"sampling": {"maxTokens": 64}}},
        "evaluation",
    ),
    ({"rollout": {"sampling": {"temperature": 0}}}, "greedy"),
    ({"model": {"source": "/m", "chatTemplate": {}}}, "exactly one of inline, file"),
    ({"evaluation": {"everySteps": 1}}, "without data.eval"),
    (
        {"rewards": [TRAINING_ALONE], "data": {"train": {"source": "d"}, "eval": {"source": "e"}}},
        "must have one that evaluation uses",
    ),
    ({"data": {"train": {"source": "d"}, "template": "no column"}}, "at least one column"),
    ({"model": {"source": "ftp://a/b"}}, "hf://org/name"),
    ({"model": {"source": "hf://a/b/c"}}, "hf://org/name"),
    ({"head": {"env": {"RLJOB_TOKEN": "x"}}}, "reserved"),
    ({"head": {"env": {"RLJOB_REWARD_DISABLE_ISOLATION": "uid"}}}, "reserved"),
    (
        {"rewards": [{"name": "x", "function": {"file": "x"}, "env": {"RLJOB_TOKEN": "x"}}]},
        "except RLJOB_REWARD_DISABLE_ISOLATION: they are reserved",
    ),
    (
        {"trainer": {"headDtype": "float32"}, "rollout": {"extraArgs": ["--hf_overrides={}"]}},
        "must have head_dtype in --hf-overrides",
    ),
    ({"algorithm": {"type": "cispo", "loss": {"dualClip": 3}}}, "has no effect with cispo"),
    ({"algorithm": {"type": "reinforcePlusPlus", "advantages": {"normalization": "none"}}}, "must be batch or null"),
    ({"algorithm": {"type": "ppo", "advantages": {"normalization": "group"}}}, "must be batch, none or null with ppo"),
    ({"algorithm": {"type": "drGrpo", "advantages": {"perReward": True}}}, "needs a type that divides"),
    ({"algorithm": {"gae": {"level": "turn", "lambda": 0.9}}}, "gae is for type ppo alone, got level, lambda"),
    ({"agent": {"type": "loop"}}, "needs a user or tools with loop"),
    ({"agent": {"user": {"function": {"inline": "x"}}}}, "is for type loop alone"),
    ({"agent": {"tools": [{"name": "t", "function": {"inline": "x"}}]}}, "is for type loop alone, got 1 of them"),
    (
        {"algorithm": {"type": "rloo", "critic": {"learningRate": 1e-4}}},
        "critic is for type ppo alone",
    ),
    ({"service": {}}, "data must be set if service is not, and left out if it is"),
    ({"data": None}, "data must be set if service is not"),
    (SERVICE | {"rewards": [TRAINING_ALONE]}, "service must not be set, nor data.train be left out, with rewards"),
    (SERVICE | {"rollout": SHARED}, "service must not be set, .* rollout.placement is trainer"),
    (SERVICE | {"algorithm": {"type": "ppo"}}, "service must not be set, .* algorithm.type is ppo"),
    (SERVICE | {"rollout": {"replicas": 0}}, "rollout.replicas must be at least 1"),
    (GIVEN_ALONE | {"rewards": [TRAINING_ALONE]}, "nor data.train be left out, with rewards"),
    (GIVEN_ALONE | {"schedule": {"warmStart": {"steps": 5}}}, "schedule.steps must be warmStart.steps without data.tr"),
    (GIVEN_ALONE | {"data": GIVEN | {"eval": {"source": "e"}}}, "train must be set with mix, curriculum or eval"),
    ({"data": {}}, "train must be set"),
    ({"trainer": {"lora": {"rank": 0}}}, "greater than or equal to 1"),
    ({"trainer": {"lora": {"rank": 1024}}}, "less than or equal to 512"),
    ({"trainer": {"lora": {"dropout": 1}}}, "less than 1"),
    ({"trainer": {"lora": {"targetModules": []}}}, "at least 1 item"),
    ({"trainer": {"lora": {"targetModules": ["all-linear", "q_proj"]}}}, "all-linear alone"),
    ({"head": {"nodePool": {"tolerations": [{"value": "x"}]}}}, "unless operator is Exists"),
    ({"trainer": {"nodePool": {"gpuResource": "gpu"}}}, "should match pattern"),
    ({"trainer": {"nodePool": {"gpuResource": "Nvidia.com/gpu"}}}, "should match pattern"),
    ({"trainer": {"nodePool": {"gpuResource": "kubernetes.io/gpu"}}}, "outside kubernetes.io"),
    ({"rewards": [SCORED_DEATH | {"episodesPerProcess": 2}]}, "must be 1 if a dead process has a score"),
    (
        {"rollout": SHARED, "schedule": {"type": "bounded"}},
        "schedule.type must be onPolicy or synchronous with rollout.placement trainer: .* alternate, got bounded",
    ),
    ({"rollout": SHARED, "schedule": {"type": "oneStepOff"}}, "set schedule.type, or remove rollout.placement"),
    ({"rollout": {"weightTransfer": "device"}}, "rollout.weightTransfer must be auto or file unless .*, got device"),
    ({"rollout": SHARED | {"weightTransfer": "ipc"}}, "Input should be 'auto', 'file' or 'device'"),
    ({"rollout": SHARED | {"replicas": 2}}, r"rollout.replicas must be 1 \(its default\) .*, got 2"),
    ({"rollout": SHARED | {"replicas": 0}, "suspend": True}, r"rollout.replicas must be 1 \(its default\) .*, got 0"),
    ({"rollout": SHARED | {"gpusPerReplica": 1}}, "a divisor of trainer.gpusPerReplica .*, got 1"),
    ({"rollout": SHARED, "trainer": {"gpusPerReplica": 1}}, "or 0 if that is 0, got 0"),
    ({"rollout": SHARED | {"gpusPerReplica": 3}, "trainer": {"gpusPerReplica": 4}}, "trainer.gpusPerReplica is 4"),
    ({"rollout": SHARED | {"image": "x"}}, "rollout.image must be left out .* set trainer.image"),
    ({"rollout": SHARED | {"env": {"A": "b"}}}, "rollout.env must be left out .* set trainer.env"),
    ({"rollout": SHARED | {"nodePool": {"exclusive": True}}}, "rollout.nodePool must be left out"),
    ({"rollout": SHARED | {"resources": {"limits": {"cpu": 1}}}}, "rollout.resources must be left out"),
    ({"rewards": [IN_TRAINER]}, r"unless rollout.placement is trainer, too, got spec.rewards\[0\].model.placement"),
    ({"rollout": SHARED, "rewards": [in_trainer(gpusPerReplica=1)]}, "must have a divisor of trainer.gpusPerReplica"),
    ({"rollout": SHARED, "rewards": [in_trainer(image="x")]}, "image must be left out with placement trainer"),
    (
        {"rollout": SHARED, "rewards": [in_trainer(resources={"limits": {"cpu": 1}})]},
        "resources must be left out with placement trainer: .* set spec.trainer.resources",
    ),
    (
        ONE_GPU | {"rollout": SHARED | {"gpusPerReplica": 1, "gpuMemoryUtilization": 0.81}},
        "rollout.gpuMemoryUtilization plus that of all models with placement trainer must be at most 1",
    ),
    (
        ONE_GPU | {"rewards": [in_trainer(gpusPerReplica=1, gpuMemoryUtilization=0.8)]},
        "plus that of all models with placement trainer must be at most 1",
    ),
    ({"trainer": {"nodePool": {"gpuResource": "requests.nvidia.com/gpu"}}}, "without requests. before it"),
    (
        {"checkpoint": {"exportPolicy": "best"}},
        "checkpoint.exportPolicy must not be best without evaluation.best.* set evaluation",
    ),
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_valid_jobs_are_accepted(fields: dict[str, Any]) -> None:
    build(**fields)


@pytest.mark.parametrize(("fields", "message"), VIOLATIONS)
def test_jobs_that_violate_a_rule_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build(**fields)


def test_a_job_without_prompts_has_no_rollouts() -> None:
    spec = build(**GIVEN_ALONE)
    assert (spec.num_rollout_pods, spec.num_rollout_replicas) == (0, 0)
    assert [each.path for each in spec.data.train_sources] == ["spec.data.warmStart"]
    assert build(data={"train": {"source": "d"}} | GIVEN, schedule=GIVEN_ALONE["schedule"]).num_rollout_pods == 1


def test_a_service_has_no_data_and_implies_adapters_and_patience() -> None:
    spec = build(**SERVICE | {"service": {"maxRank": 8}})
    assert (list(spec.sources), spec.num_steps, spec.num_exports) == (["spec.model.source"], 0, 0)
    lora = spec.trainer.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.publish, spec.hang_detection.min_seconds) == (8, 8, "adapter", 1800)
    own = build(**SERVICE | {"trainer": {"lora": {"rank": 4}}, "hangDetection": {"minSeconds": 3600}})
    assert own.trainer.lora is not None
    assert (own.trainer.lora.rank, own.hang_detection.min_seconds) == (4, 3600)


def test_indivisible_batch_is_reported_once() -> None:
    with pytest.raises(ValidationError) as caught:
        build(schedule={"promptsPerStep": 8, "miniBatches": 3}, trainer={"replicas": 5})
    assert "ranks" not in str(caught.value)


@pytest.mark.parametrize(
    ("trainer", "gpus", "per_pod", "total"),
    [({"replicas": 3}, 0, 1, 3), ({"gpusPerReplica": 1}, 1, 1, 1), ({"replicas": 2, "gpusPerReplica": 8}, 2, 4, 8)],
)
def test_replicas_that_share_the_trainer_follow_from_its_gpus(trainer, gpus, per_pod, total) -> None:
    schedule, algorithm = {"promptsPerStep": 16}, {"groupSize": 6}
    rollout = SHARED | {"gpusPerReplica": gpus}
    spec = build(trainer=trainer, rollout=rollout, schedule=schedule, algorithm=algorithm)
    assert (spec.engines_per_pod, spec.num_rollout_replicas, spec.num_rollout_pods) == (per_pod, total, 0)
    assert list(spec.own_roles) == ["head", "trainer"]


def test_replicas_with_pods_of_their_own_are_those_of_the_field() -> None:
    spec = build(rollout={"replicas": 3})
    assert (spec.engines_per_pod, spec.num_rollout_replicas, spec.num_rollout_pods) == (0, 3, 3)
    assert list(spec.own_roles) == ["head", "trainer", "rollout"]


@pytest.mark.parametrize(
    ("rollout", "share"), [({}, 0.9), (SHARED, 0.8), (SHARED | {"gpuMemoryUtilization": 0.5}, 0.5)]
)
def test_memory_of_a_shared_gpu_leaves_room_for_the_ranks(rollout, share) -> None:
    assert build(rollout=rollout).rollout_gpu_share == share


def test_models_in_the_trainers_pods_take_their_share_from_the_rollouts() -> None:
    spec = build(**ONE_GPU)
    assert (spec.rollout_gpu_share, spec.models_gpu_share) == (0.6, 0.2)
    given = build(**ONE_GPU | {"rollout": SHARED | {"gpusPerReplica": 1, "gpuMemoryUtilization": 0.8}})
    assert (given.rollout_gpu_share, given.models_gpu_share) == (0.8, 0.2)


@pytest.mark.parametrize(
    ("source", "chosen", "seconds"), [("/model", None, 600), ("hf://org/name", None, 4200), ("hf://org/name", 90, 90)]
)
def test_start_of_a_rollout_has_more_time_for_a_download(source: str, chosen: int | None, seconds: int):
    spec = build(model={"source": source}, rollout={"startupTimeoutSeconds": chosen})
    assert spec.rollout_startup_seconds == seconds


@pytest.mark.parametrize(
    ("export", "best", "num_exports"),
    [("never", True, 0), ("last", True, 1), ("best", True, 1), ("every", False, 4), ("every", True, 5)],
)
def test_folder_has_an_export_for_each_checkpoint_also_of_the_best_step(
    export: str, best: bool, num_exports: int
) -> None:
    evaluation = {"everySteps": 1, "best": {"set": "eval"}} if best else {}
    data = {"train": {"source": "d"}, "eval": {"source": "e"}}
    spec = build(checkpoint={"keep": 3, "exportPolicy": export}, evaluation=evaluation, data=data)
    assert (spec.num_kept_checkpoints, spec.num_exports) == (3 + best, num_exports)
