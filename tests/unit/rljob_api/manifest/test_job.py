from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rljob_api.manifest.job import RLJobSpec


def build(**fields: Any) -> RLJobSpec:
    reward = {"name": "r", "function": {"file": "r.py"}}
    required = {"model": {"source": "m"}, "data": {"train": {"source": "d"}}, "rewards": [reward]}
    return RLJobSpec.model_validate({**required, **fields})


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"schedule": {"promptsPerStep": 6, "miniBatches": 3}, "algorithm": {"groupSize": 4}, "trainer": {"replicas": 8}},
    {"rollout": {"replicas": 0}, "suspend": True},
    {"rollout": {"maxModelLen": 64, "sampling": {"maxTokens": 63}}},
    {"rewards": [{"name": "x", "http": {"url": "https://x"}, "replicas": 0}]},
    {"evaluation": {"everySteps": 1}, "data": {"train": {"source": "d"}, "eval": {"source": "e"}}},
    {"rewards": [{"name": "penalty", "function": {"file": "x"}, "weight": -1}]},
    {"rewards": [{"name": n, "function": {"file": "x"}, "weight": w} for n, w in (("logged", 0), ("counts", 1))]},
    {"algorithm": {"type": "gspo", "loss": {"clipLow": 3e-3, "clipHigh": 4e-3}}},
    {"algorithm": {"type": "dapo", "clipLow": 0.2, "clipHigh": 0.2, "lossLevel": "token", "normalization": "group"}},
    {"algorithm": {"importanceCap": 0.5}},
    {"evaluation": {"sampling": {"topP": 0.9, "topK": 20}}},
    {"trainer": {"lora": {}}},
    {"trainer": {"lora": {"rank": 8, "alpha": 16, "targetModules": ["q_proj", "v_proj"], "publish": "adapter"}}},
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
    ({"rollout": {"maxModelLen": 64, "sampling": {"maxTokens": 64}}}, "leave room for the prompt"),
    (
        {"rollout": {"maxModelLen": 600}, "data": {"train": {"source": "d"}, "maxPromptTokens": 100}},
        "leave room for the prompt",
    ),
    ({"rollout": {"maxModelLen": 512, "sampling": {"maxTokens": 9}}, "evaluation": {"sampling": {}}}, "evaluation"),
    ({"rollout": {"sampling": {"temperature": 0}}}, "greedy"),
    ({"evaluation": {"everySteps": 1}}, "without data.eval"),
    ({"data": {"train": {"source": "d"}, "template": "no column"}}, "at least one column"),
    ({"model": {"source": "s3://a/b"}}, "hf://org/name"),
    ({"model": {"source": "hf://a/b/c"}}, "hf://org/name"),
    ({"head": {"env": {"RLJOB_TOKEN": "x"}}}, "reserved"),
    ({"algorithm": {"type": "dapo", "clipHigh": 0.3}}, "set loss.clipHigh instead"),
    ({"algorithm": {"type": "cispo", "normalization": "batch"}}, "set advantages.normalization instead"),
    ({"algorithm": {"importanceCap": 3, "correction": {"type": "none"}}}, "set correction.cap"),
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
    ({"trainer": {"lora": {"rank": 0}}}, "greater than or equal to 1"),
    ({"trainer": {"replicas": 2, "gpusPerReplica": 1, "sharding": "perReplica"}}, "with fewer than 2 GPUs per Pod"),
    ({"trainer": {"lora": {"rank": 1024}}}, "less than or equal to 512"),
    ({"trainer": {"lora": {"dropout": 1}}}, "less than 1"),
    ({"trainer": {"lora": {"targetModules": []}}}, "at least 1 item"),
    ({"trainer": {"lora": {"targetModules": ["all-linear", "q_proj"]}}}, "all-linear alone"),
    ({"head": {"nodePool": {"tolerations": [{"value": "x"}]}}}, "unless operator is Exists"),
    ({"trainer": {"nodePool": {"gpuResource": "gpu"}}}, "should match pattern"),
    ({"trainer": {"nodePool": {"gpuResource": "Nvidia.com/gpu"}}}, "should match pattern"),
    ({"trainer": {"nodePool": {"gpuResource": "kubernetes.io/gpu"}}}, "outside kubernetes.io"),
    ({"trainer": {"nodePool": {"gpuResource": "requests.nvidia.com/gpu"}}}, "without requests. before it"),
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_valid_jobs_are_accepted(fields: dict[str, Any]) -> None:
    build(**fields)


@pytest.mark.parametrize(("fields", "message"), VIOLATIONS)
def test_jobs_that_violate_a_rule_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build(**fields)


def test_indivisible_batch_is_reported_once() -> None:
    with pytest.raises(ValidationError) as caught:
        build(schedule={"promptsPerStep": 8, "miniBatches": 3}, trainer={"replicas": 5})
    assert "ranks" not in str(caught.value)
