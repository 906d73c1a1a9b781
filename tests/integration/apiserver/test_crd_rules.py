"""Every rule of the CRDs, checked by a real API server and by rljob_api: both reject with the remedy.

The tables name each rule by its type and message; a rule without a case fails a test. The cases of bounds, enums and
patterns are generated from the schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from kubernetes import client

from rljob_api.generate.crd import build_object_schema
from rljob_api.manifest.base import Spec
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.read.load import InvalidManifestError, load_manifests
from tests.integration.apiserver.manifests import INLINE, MISSING, put, put_all, smallest
from tests.paths import ROOT
from tests.support import fast_yaml

GROUP, VERSION = "rljob.dev", "v1alpha1"
MODELS: dict[str, Any] = {"RLJob": RLJob, "RewardModel": RewardModel}
JUDGE = {"template": "x", "parser": {"regex": "(x)"}, "endpoint": {"url": "https://x", "model": "m"}}
EMPTY_FUNCTION = {"rewards.0.function": {"entrypoint": "f"}}


def judge(**changes: Any) -> dict[str, Any]:
    """Return a minimal judge with changes to itself or to its endpoint's limits."""
    limits = changes.pop("limits", None)
    endpoint = JUDGE["endpoint"] | ({"limits": limits} if limits else {})
    return JUDGE | {"endpoint": endpoint} | changes


def model_user(limits: dict[str, Any]) -> dict[str, Any]:
    """Return a chat model at an endpoint that plays the user."""
    return {"endpoint": JUDGE["endpoint"] | {"limits": limits}, "persona": "x"}


MAX_BELOW_MIN = {"minReplicas": 3, "maxReplicas": 2}
HTTP_WITH_AUTOSCALING: dict[str, Any] = {"http": {"url": "https://example.com"}, "autoscaling": {"maxReplicas": 2}}
NEMO_GYM = {"http": {"url": "https://example.com/verify", "protocol": "nemoGym"}}
EVALUATION_SET = {"name": "math", "data": {"source": "/m"}}
WITHOUT_FUNCTION: dict[str, Any] = {"function": MISSING}
ENDPOINT: dict[str, Any] = {"http": {"url": "https://example.com"}}
REFERENCE_WITH_AUTOSCALING: dict[str, Any] = {"rewardModelRef": {"name": "math"}, "autoscaling": {"maxReplicas": 2}}

SHARED: dict[str, Any] = {"rollout.placement": "trainer"}
MODEL_IN_TRAINER: dict[str, Any] = {"source": "/m", "placement": "trainer"}
IN_TRAINER: dict[str, Any] = {"name": "r", "model": MODEL_IN_TRAINER}
JUDGED = {"template": "x", "parser": {"regex": "(x)"}, "model": MODEL_IN_TRAINER}
JUDGE_IN_TRAINER: dict[str, Any] = {"name": "r", "judge": JUDGED}
TEACHER_IN_TRAINER: dict[str, Any] = {"name": "r", "teacher": {"model": MODEL_IN_TRAINER}}
TEACHER: dict[str, Any] = {"function": MISSING, "teacher": {"endpoint": {"url": "https://example.com", "model": "m"}}}
USER_IN_TRAINER: dict[str, Any] = {"model": {"persona": "x", "model": MODEL_IN_TRAINER}}
ON_GPU: dict[str, Any] = {"judge": JUDGED | {"model": MODEL_IN_TRAINER | {"gpusPerReplica": 1}}}
SHARED_GPU: dict[str, Any] = SHARED | {
    "trainer.gpusPerReplica": 1,
    "rollout.gpusPerReplica": 1,
    "rewards.0": {"name": "r", "model": MODEL_IN_TRAINER | {"gpusPerReplica": 1}},
}
FUNCTION: dict[str, Any] = {"function": {"inline": INLINE}}
TOOL: dict[str, Any] = {"name": "calculator"} | FUNCTION
WITH_AGENT: dict[str, Any] = {"data.format": "chat", "agent": {"type": "loop", "user": FUNCTION, "tools": [TOOL]}}

CHAT: dict[str, Any] = {"data.format": "chat"}
TRL: dict[str, Any] = {"framework": "trl", "id": "envs:Guess"}
PROGRAM: dict[str, Any] = CHAT | {"agent": {"type": "program", "runner": FUNCTION}}
AT_MOST_TWO = {"maxReplicas": 2}
SCALED_PROGRAM = put_all({"spec": PROGRAM}, {"agent.runner.autoscaling": AT_MOST_TWO})["spec"]
WITH_SCALED_AGENT = put_all(
    {"spec": WITH_AGENT}, {"agent.user.autoscaling": AT_MOST_TWO, "agent.tools.0.autoscaling": AT_MOST_TWO}
)["spec"]
SHARED_PROCESSES = {"episodesPerProcess": 2}
COMMAND = {"command": ["agent"]}
LIMITED = {"function": FUNCTION["function"] | {"cpuSeconds": 5}}
SANDBOX_WITHOUT_MEMORY = {"name": "code", "sandbox": {"maxMemory": "1Mi"}}
SMALL_CACHE = {"source": "/m", "kvCacheMemory": "1Ki"}
SANDBOX_WITH_PODS = {"name": "code", "sandbox": {"image": "python"}}
REWARD = smallest()["spec"]["rewards"][0]
OTHER_DATA = {"name": "other", "source": "/other.jsonl"}
ROWS = {"source": "env://train"}
GIVEN: dict[str, Any] = {"source": "/given.jsonl"}
WARM: dict[str, Any] = {"data.warmStart": GIVEN, "schedule.warmStart": {"steps": 5}}
GIVEN_ALONE = WARM | {"schedule.steps": 5, "data.train": MISSING, "rewards": MISSING}
OTHER_ROWS = {"name": "other"} | ROWS
RUN_COMMAND: dict[str, Any] = {"type": "program", "runner": COMMAND}
OTHER_MODEL = {"name": "judge", "url": "http://judge/v1"}
ENVIRONMENT: dict[str, Any] = CHAT | {"agent": {"type": "environment", "environment": TRL}}

# (type, start of the message, kind of object, changes to the minimal one that violate the rule)
VIOLATIONS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("Model", "must be hf://org/name, pvc://", "RLJob", {"model.source": "ftp://host/model"}),
    ("DataSource", "must be hf://org/name, pvc://", "RLJob", {"data.eval": {"source": "hf://"}}),
    ("TrainSource", "must be hf://org/name, pvc://", "RLJob", {"data.train.source": "hf://"}),
    ("MixedSource", "must be hf://org/name, pvc://", "RLJob", {"data.mix": [OTHER_DATA | {"source": "hf://"}]}),
    ("DataSource", "must be left out with env://", "RLJob", PROGRAM | {"data.eval": ROWS | {"revision": "main"}}),
    ("TrainSource", "must be left out with env://", "RLJob", PROGRAM | {"data.train": ROWS | {"split": "train"}}),
    ("MixedSource", "must be left out with env://", "RLJob", PROGRAM | {"data.mix": [OTHER_ROWS | {"subset": "a"}]}),
    ("GivenSource", "must be hf://org/name, pvc://", "RLJob", WARM | {"data.warmStart.source": "env://train"}),
    ("Schedule", "must be at least warmStart.steps", "RLJob", WARM | {"schedule.steps": 4}),
    ("RLJobSpec", "must be set together", "RLJob", {"data.warmStart": GIVEN}),
    ("Data", "must have names that differ", "RLJob", {"data.mix": [OTHER_DATA | {"name": "train"}]}),
    ("Data", "must contain at least one column", "RLJob", {"data.template": "Answer this: prompt"}),
    ("Tracking", "must be set, since wandbEntity", "RLJob", {"tracking.wandbGroup": "ablations"}),
    ("Toleration", "must be set unless operator", "RLJob", {"trainer.nodePool.tolerations": [{"value": "a"}]}),
    (
        "Toleration",
        "must be unset when operator",
        "RLJob",
        {"head.nodePool.tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
    ),
    (
        "NodePool",
        "must be an extended resource",
        "RLJob",
        {"rollout.nodePool.gpuResource": "example.kubernetes.io/gpu"},
    ),
    *(
        (f"{role.capitalize()}Role", "must not set names", "RLJob", {f"{role}.env": {"RLJOB_TOKEN": "x"}})
        for role in ("head", "trainer", "rollout")
    ),
    ("Reward", "must not set names", "RLJob", {"rewards.0.env": {"RLJOB_TOKEN": "x"}}),
    *(
        (type_name, "must be at least 1Mi and at most 60Mi", kind, {**changes, f"{path}maxRequestSize": size})
        for type_name, kind, path, changes, size in (
            ("Reward", "RLJob", "rewards.0.", {}, "61Mi"),
            ("RewardModelSpec", "RewardModel", "", {}, 16),
            ("SimulatedUser", "RLJob", "agent.user.", WITH_AGENT, "1k"),
            ("Tool", "RLJob", "agent.tools.0.", WITH_AGENT, "1Gi"),
            ("Runner", "RLJob", "agent.runner.", PROGRAM, "0"),
        )
    ),
    ("FunctionReward", "must be at least 64Mi", "RLJob", {"rewards.0.function.maxMemory": 2048}),
    ("FunctionReward", "must be at least 1Mi", "RLJob", {"rewards.0.function.maxFileSize": "900Ki"}),
    ("PythonFunction", "must be at least 64Mi", "RLJob", WITH_AGENT | {"agent.user.function.maxMemory": "63.9Mi"}),
    ("PythonFunction", "must be at least 1Mi", "RLJob", WITH_AGENT | {"agent.user.function.maxFileSize": "500m"}),
    ("Sandbox", "must be at least 64Mi", "RLJob", WITH_AGENT | {"agent.tools": [SANDBOX_WITHOUT_MEMORY]}),
    ("RolloutRole", "must be at least 64Ki", "RLJob", {"rollout.kvCacheMemory": 1}),
    ("ModelReward", "must be at least 64Ki", "RewardModel", {**WITHOUT_FUNCTION, "model": SMALL_CACHE}),
    ("ServedModel", "must be at least 64Ki", "RewardModel", {**WITHOUT_FUNCTION, "judge": judge(model=SMALL_CACHE)}),
    ("Tracking", "must be 0 or at least 1Mi", "RLJob", {"tracking.trajectoriesSize": 4096}),
    *(
        (type_name, "must be at least 600", kind, {**changes, f"{path}backoffWindowSeconds": 700})
        for type_name, kind, path, changes in (
            ("HeadRole", "RLJob", "head.", {}),
            ("TrainerRole", "RLJob", "trainer.", {"trainer.backoffLimit": 1}),
            ("RolloutRole", "RLJob", "rollout.", {}),
            ("Reward", "RLJob", "rewards.0.", {}),
            ("RewardModelSpec", "RewardModel", "", {}),
            ("SimulatedUser", "RLJob", "agent.user.", WITH_AGENT),
            ("Tool", "RLJob", "agent.tools.0.", WITH_AGENT),
            ("Runner", "RLJob", "agent.runner.", PROGRAM),
        )
    ),
    ("RewardModelSpec", "must not set names", "RewardModel", {"env": {"RLJOB_TOKEN": "x"}}),
    ("FunctionReward", "must have exactly one of inline", "RLJob", EMPTY_FUNCTION),
    ("Reward", "must have exactly one of function", "RLJob", {"rewards.0.http": {"url": "https://example.com"}}),
    ("RewardModelSpec", "must have exactly one of function", "RewardModel", {"function": MISSING}),
    *(
        (type_name, message, kind, {f"{path}{field}": value, f"{path}episodesPerProcess": 2})
        for type_name, kind, path in (("Reward", "RLJob", "rewards.0."), ("RewardModelSpec", "RewardModel", ""))
        for message, field, value in (
            ("must be 1 with a limit of CPU time", "function.cpuSeconds", 5),
            ("must be 1 with isolation: request", "function.isolation", "request"),
        )
    ),
    (
        "Reward",
        "must be 1 without a function",
        "RLJob",
        {"rewards.0": {"name": "correct", "http": {"url": "http://r"}} | SHARED_PROCESSES},
    ),
    (
        "RewardModelSpec",
        "must be 1 without a function",
        "RewardModel",
        WITHOUT_FUNCTION | {"judge": JUDGE_IN_TRAINER["judge"]} | SHARED_PROCESSES,
    ),
    (
        "Reward",
        "must be 1 if a dead process has a score",
        "RLJob",
        {"rewards.0.failurePolicy": {"scores": {"workerDied": 0}}, "rewards.0.episodesPerProcess": 2},
    ),
    ("ModelReward", "must be hf://org/name, pvc://", "RewardModel", {"model": {"source": "ftp://host/model"}}),
    ("ServedModel", "must be hf://org/name, pvc://", "RewardModel", {"judge": judge(model={"source": "ftp://h/m"})}),
    ("JudgeReward", "must have exactly one of model", "RewardModel", {"judge": judge(model={"source": "/m"})}),
    ("JudgeReward", "must be 1 at temperature 0", "RewardModel", {"judge": judge(votes=3)}),
    ("JudgeParser", "must have exactly one of regex", "RewardModel", {"judge": judge(parser={"scorePath": "x"})}),
    (
        *("JudgeParser", "must not be more than maxScore", "RewardModel"),
        {"judge": judge(parser={"regex": "x", "minScore": 2, "maxScore": 1})},
    ),
    *(
        (type_name, message, kind, {f"{path}function": MISSING, f"{path}judge": judge(limits=limits), **more})
        for type_name, kind, path in (("Reward", "RLJob", "rewards.0."), ("RewardModelSpec", "RewardModel", ""))
        for message, limits, more in (
            ("must be at least votes x replicas", {"concurrency": 3}, {f"{path}replicas": 4}),
            ("must be at least 2 x votes x replicas", {"requestsPerMinute": 7.5}, {f"{path}replicas": 4}),
        )
    ),
    *(
        (type_name, message, "RLJob", {f"rewards.0.{name}": value for name, value in (TEACHER | changes).items()})
        for type_name, message, changes in (
            ("TeacherModel", "must be hf://org/name, pvc://", {"teacher": {"model": {"source": "ftp://h/m"}}}),
            ("TeacherModel", "must be at least 64Ki", {"teacher": {"model": SMALL_CACHE}}),
            ("TeacherReward", "must have exactly one of model", {"teacher": {"clip": 2}}),
            ("Reward", "must be sample for a teacher", {"scope": "group"}),
            ("Reward", "must be training with a hint", {"teacher": {"hint": "x"}}),
            (
                "Reward",
                "must not be set together with rewardModelRef, nor",
                {"teacher": {"hint": "x"}, "use": "training", "autoscaling": AT_MOST_TWO},
            ),
            ("Reward", "must be false for a teacher", {"cache": True}),
            ("Reward", "must be at least replicas", {"replicas": 4, "teacher.endpoint.limits": {"concurrency": 3}}),
            ("Reward", "must be at least 2 x replicas", {"teacher.endpoint.limits": {"requestsPerMinute": 1}}),
        )
    ),
    (
        *("RLJobSpec", "must be 1 with a teacher", "RLJob"),
        {"rewards.0": {"name": "r", "teacher": {"model": {"source": "/m"}}}, "rollout.sampling.temperature": 0.5},
    ),
    ("JudgeReward", "must have jsonSchema for ranking", "RewardModel", {"judge": judge(compare="ranking")}),
    *(
        (type_name, message, kind, {f"{path}{name}": value for name, value in changes.items()})
        for type_name, kind, path in (("Reward", "RLJob", "rewards.0."), ("RewardModelSpec", "RewardModel", ""))
        for message, changes in (
            ("must be sample for a model", {**WITHOUT_FUNCTION, "model": {"source": "/m"}, "scope": "group"}),
            ("must be group exactly when", {**WITHOUT_FUNCTION, "judge": judge(compare="pairwise")}),
            ("must be sample or group", {**WITHOUT_FUNCTION, **ENDPOINT, "scope": "sampleThenGroup"}),
            ("must be sample with protocol", {**WITHOUT_FUNCTION, **NEMO_GYM, "scope": "group"}),
            ("must be false with scope group", {"cache": True, "scope": "group"}),
        )
    ),
    ("Autoscaling", "must be at least minReplicas", "RLJob", {"rewards.0.autoscaling": MAX_BELOW_MIN}),
    ("Reward", "must not be set together with http", "RLJob", {"rewards.0": HTTP_WITH_AUTOSCALING | {"name": "r"}}),
    (
        "RewardModelSpec",
        "must not be set together with http",
        "RewardModel",
        {"function": MISSING, **HTTP_WITH_AUTOSCALING},
    ),
    (
        "Reward",
        "must not be set together with rewardModelRef",
        "RLJob",
        {"rewards.0": REFERENCE_WITH_AUTOSCALING | {"name": "r"}},
    ),
    (
        "RLJobSpec",
        "must divide schedule.promptsPerStep",
        "RLJob",
        {"schedule": {"promptsPerStep": 8, "miniBatches": 3}},
    ),
    ("Schedule", "is for type bounded alone", "RLJob", {"schedule.maxStaleness": 2}),
    ("TrainingSampling", "must be 1 for training", "RLJob", {"rollout.sampling.topP": 0.9}),
    ("TrainingSampling", "must be 0 for training", "RLJob", {"rollout.sampling.topK": 20}),
    ("RLJobSpec", "x algorithm.groupSize", "RLJob", {"trainer.replicas": 5}),
    (
        "RLJobSpec",
        "must have different names",
        "RLJob",
        {"rewards": [{"name": "a", "function": {"inline": INLINE}}] * 2},
    ),
    ("RLJobSpec", "must have a weight other than 0", "RLJob", {"rewards.0.weight": 0}),
    ("RLJobSpec", "must be at least 1 unless", "RLJob", {"rollout.replicas": 0}),
    ("RLJobSpec", "must be onPolicy or synchronous", "RLJob", SHARED | {"schedule.type": "bounded"}),
    ("RLJobSpec", "must be auto or file unless", "RLJob", {"rollout.weightTransfer": "device"}),
    ("RLJobSpec", "must be 1 (its default)", "RLJob", SHARED | {"rollout.replicas": 2}),
    ("RLJobSpec", "must be a divisor of", "RLJob", SHARED | {"rollout.gpusPerReplica": 1}),
    *(
        ("RLJobSpec", "must be left out with", "RLJob", SHARED | {f"rollout.{path}": value})
        for path, value in (
            ("image", "x"),
            ("resources", {"requests": {"cpu": 1}}),
            ("nodePool.topology", {"key": "rack"}),
            ("env", {"A": "b"}),
        )
    ),
    *(
        ("RLJobSpec", message, "RLJob", changes)
        for message, changes in (
            ("must have no model with placement trainer", {"rewards.0": IN_TRAINER}),
            ("must have a divisor of trainer.gpusPerReplica", SHARED | {"rewards.0": JUDGE_IN_TRAINER | ON_GPU}),
            ("plus that of all models", SHARED_GPU | {"rollout.gpuMemoryUtilization": 0.9}),
        )
    ),
    *(
        (type_name, "must be left out with placement trainer", "RLJob", SHARED | {"rewards.0": reward} | more)
        for type_name, reward, more in (
            ("ModelReward", IN_TRAINER, {"rewards.0.model.image": "x"}),
            ("ModelReward", IN_TRAINER, {"rewards.0.model.resources.requests": {"cpu": 1}}),
            ("ServedModel", JUDGE_IN_TRAINER, {"rewards.0.judge.model.image": "x"}),
            ("TeacherModel", TEACHER_IN_TRAINER, {"rewards.0.teacher.model.image": "x"}),
            ("TeacherModel", TEACHER_IN_TRAINER, {"rewards.0.teacher.model.resources.limits": {"cpu": 1}}),
            ("ServedModel", JUDGE_IN_TRAINER, {"rewards.0.judge.model.resources.limits": {"cpu": 1}}),
        )
    ),
    *(
        ("RewardModelSpec", "must be separate: a RewardModel", "RewardModel", WITHOUT_FUNCTION | {kind: reward[kind]})
        for kind, reward in (("model", IN_TRAINER), ("judge", JUDGE_IN_TRAINER))
    ),
    ("RLJobSpec", "must have at least 1 replica each", "RLJob", {"rewards.0.replicas": 0}),
    ("RLJobSpec", "must leave room", "RLJob", {"rollout": {"maxModelLen": 64, "sampling": {"maxTokens": 64}}}),
    (
        "RLJobSpec",
        "must leave room",
        "RLJob",
        {
            "rollout": {"maxModelLen": 64, "sampling": {"maxTokens": 16}},
            "evaluation": {"sampling": {"maxTokens": 64}},
        },
    ),
    ("ChatTemplate", "must have exactly one", "RLJob", {"model.chatTemplate": {"inline": "{{ a }}", "file": "b"}}),
    ("RLJobSpec", "must be more than 0 for training", "RLJob", {"rollout.sampling.temperature": 0}),
    ("RLJobSpec", "or evaluation.sets must be set with task evaluate", "RLJob", {"task": "evaluate"}),
    (
        "RLJobSpec",
        "must be separate with task evaluate",
        "RLJob",
        {"task": "evaluate", "data.eval": {"source": "hf://org/data"}, "rollout.placement": "trainer"},
    ),
    ("RLJobSpec", "must be 0 without data.eval and evaluation.sets", "RLJob", {"evaluation.everySteps": 5}),
    ("Evaluation", "must have different names", "RLJob", {"evaluation.sets": [EVALUATION_SET, EVALUATION_SET]}),
    (
        "RLJobSpec",
        "must not have an entry named eval",
        "RLJob",
        {"data.eval": {"source": "/e"}, "evaluation.sets": [EVALUATION_SET | {"name": "eval"}]},
    ),
    (
        "RLJobSpec",
        "must have as rewards the names",
        "RLJob",
        {"evaluation.sets": [EVALUATION_SET | {"rewards": ["unknown"]}]},
    ),
    (
        "RLJobSpec",
        "must have a temperature of more than 0",
        "RLJob",
        {"evaluation": {"sampling": {"temperature": 0}, "sets": [EVALUATION_SET | {"samplesPerPrompt": 2}]}},
    ),
    (
        "RLJobSpec",
        "must be the name of an evaluation set",
        "RLJob",
        {"evaluation": {"sets": [EVALUATION_SET], "best": {"set": "other"}}},
    ),
    (
        "RLJobSpec",
        "must be a number that its set reports",
        "RLJob",
        {"evaluation": {"sets": [EVALUATION_SET], "best": {"set": "math", "metric": "pass@8"}}},
    ),
    (
        "Checkpoint",
        "must not be set next to persistentVolumeClaim",
        "RLJob",
        {"checkpoint": {"storage": "s3://bucket/runs", "persistentVolumeClaim": {"claimName": "runs"}}},
    ),
    ("RLJobSpec", "must not be best without evaluation.best", "RLJob", {"checkpoint.exportPolicy": "best"}),
    ("RLJobSpec", "must have one that training uses", "RLJob", {"rewards.0.use": "evaluation"}),
    (
        "RLJobSpec",
        "must have one that evaluation uses",
        "RLJob",
        {"rewards.0.use": "training", "data.eval": {"source": "hf://org/data"}},
    ),
    (
        "RLJobSpec",
        "must have head_dtype in --hf-overrides",
        "RLJob",
        {"trainer.headDtype": "float32", "rollout.extraArgs": ["--hf-overrides={}"]},
    ),
    ("Algorithm", "has no effect with cispo", "RLJob", {"algorithm": {"type": "cispo", "loss": {"dualClip": 3}}}),
    (
        "Algorithm",
        "must be batch or null",
        "RLJob",
        {"algorithm": {"type": "reinforcePlusPlusBaseline", "advantages": {"normalization": "group"}}},
    ),
    (
        "Algorithm",
        "must be batch, none or null",
        "RLJob",
        {"algorithm": {"type": "ppo", "advantages": {"normalization": "group"}}},
    ),
    (
        "Algorithm",
        "needs a type that divides",
        "RLJob",
        {"algorithm": {"type": "rloo", "advantages": {"perReward": True}}},
    ),
    ("Algorithm", "is for type ppo alone", "RLJob", {"algorithm": {"gae": {"level": "turn"}}}),
    ("Algorithm", "is for type ppo alone", "RLJob", {"algorithm": {"type": "rloo", "critic": {"beta1": 0.8}}}),
    ("Agent", "is for type loop alone", "RLJob", {"agent": {"user": FUNCTION}}),
    ("Agent", "is for type loop alone", "RLJob", {"agent": {"type": "singleTurn", "tools": [TOOL]}}),
    ("Agent", "needs a user or tools", "RLJob", {"data.format": "chat", "agent": {"type": "loop", "tools": []}}),
    ("Agent", "must have different names", "RLJob", WITH_AGENT | {"agent.tools": [TOOL, TOOL]}),
    ("Agent", "must have different names", "RLJob", PROGRAM | {"agent.seats": ["first", "first"]}),
    ("Agent", "must not be named user", "RLJob", WITH_AGENT | {"agent.tools.0.name": "user"}),
    ("SimulatedUser", "must not set names", "RLJob", WITH_AGENT | {"agent.user.env": {"RLJOB_TOKEN": "x"}}),
    *(
        ("SimulatedUser", message, "RLJob", WITH_AGENT | {"agent.user": {"model": model_user(limits), **more}})
        for message, limits, more in (
            ("must have exactly one of", {}, FUNCTION),
            ("must be at least replicas", {"concurrency": 3}, {"replicas": 4}),
            ("must be at least 2 x replicas", {"requestsPerMinute": 7}, {"autoscaling": {"maxReplicas": 4}}),
        )
    ),
    ("UserModel", "must have exactly one of", "RLJob", WITH_AGENT | {"agent.user": {"model": {"persona": "x"}}}),
    ("Tool", "must not set names", "RLJob", WITH_AGENT | {"agent.tools.0.env": {"RLJOB_TOKEN": "x"}}),
    ("Tool", "must have exactly one of", "RLJob", WITH_AGENT | {"agent.tools.0.mcp": {"url": "http://search/mcp"}}),
    ("Sandbox", "must be agentSandbox with image", "RLJob", WITH_AGENT | {"agent.tools": [SANDBOX_WITH_PODS]}),
    ("McpServer", "must have exactly one of", "RLJob", WITH_AGENT | {"agent.tools": [{"name": "search", "mcp": {}}]}),
    ("PythonFunction", "must have exactly one", "RLJob", WITH_AGENT | {"agent.user.function": {"entrypoint": "f"}}),
    (
        "FunctionReward",
        "must be empty with an entrypoint",
        "RLJob",
        {"rewards.0.function": {"inline": INLINE, "entrypoint": "f", "entrypoints": ["g"]}},
    ),
    ("RLJobSpec", "must have names that no reward", "RLJob", WITH_AGENT | {"agent.tools.0.name": "correct"}),
    ("RLJobSpec", "must not be named user", "RLJob", WITH_AGENT | {"rewards.0.name": "user"}),
    ("RLJobSpec", "must be chat unless agent.type", "RLJob", WITH_AGENT | {"data.format": "text"}),
    ("Agent", "must be set with type environment", "RLJob", CHAT | {"agent": {"type": "environment"}}),
    ("Agent", "needs environment.id or runner.function", "RLJob", ENVIRONMENT | {"agent.runner": FUNCTION}),
    ("Agent", "is for the types environment and program", "RLJob", {"agent": {"runner": FUNCTION}}),
    ("Agent", "must have a function or a command", "RLJob", CHAT | {"agent": {"type": "program"}}),
    ("Agent", "are called by environments and programs alone", "RLJob", {"agent": {"models": [OTHER_MODEL]}}),
    ("Agent", "must have one entry for each", "RLJob", PROGRAM | {"agent.models": [OTHER_MODEL, OTHER_MODEL]}),
    ("Agent", "must not be named policy", "RLJob", PROGRAM | {"agent.models": [OTHER_MODEL | {"name": "default"}]}),
    ("Runner", "are alternatives", "RLJob", PROGRAM | {"agent.runner.command": ["agent"]}),
    ("Runner", "must be 1 for a command", "RLJob", PROGRAM | {"agent.runner": COMMAND | SHARED_PROCESSES}),
    ("Runner", "must be 1 with a limit of CPU time", "RLJob", PROGRAM | {"agent.runner": LIMITED | SHARED_PROCESSES}),
    ("Agent", "are of environments and programs alone", "RLJob", {"agent": {"seats": ["first", "second"]}}),
    ("Runner", "is the folder of a command", "RLJob", PROGRAM | {"agent.runner.workingDir": "/app"}),
    ("Runner", "must not set names", "RLJob", PROGRAM | {"agent.runner.env": {"RLJOB_TOKEN": "x"}}),
    ("RLJobSpec", "must not be named runner", "RLJob", PROGRAM | {"rewards.0.name": "runner"}),
    ("RLJobSpec", "must have at least one entry", "RLJob", {"rewards": []}),
    ("RLJobSpec", "must be set if service is not", "RLJob", {"service": {}, "rewards": MISSING}),
    ("RLJobSpec", "must not be set, nor data.train", "RLJob", {"service": {}, "data": MISSING}),
    ("RLJobSpec", "must be warmStart.steps without", "RLJob", {**GIVEN_ALONE, "schedule.steps": 6}),
    ("Data", "must be set with mix, curriculum or", "RLJob", {**GIVEN_ALONE, "data.eval": {"source": "/e.jsonl"}}),
    ("RLJobSpec", "must have env:// only with", "RLJob", {"data.train": ROWS}),
    ("Lora", "must be names of modules", "RLJob", {"trainer.lora": {"targetModules": ["all-linear", "q_proj"]}}),
]

JOB_WITH_USER_IN_TRAINER: dict[str, Any] = {
    "data.format": "chat",
    "agent": {"type": "loop", "user": {"model": {"persona": "x", "model": MODEL_IN_TRAINER}}},
}
IN_KUEUE = {"scheduling": {"gang": "kueue", "queue": "q"}}
SERVICE: dict[str, Any] = {"data": MISSING, "rewards": MISSING, "service": {"maxRank": 16}}

# (field, changes to the minimal job, changes that an update must not make)
IMMUTABLE_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("task", {"data.eval": {"source": "hf://org/data"}}, {"task": "evaluate"}),
    ("model", {}, {"model.source": "hf://org/other"}),
    ("data.train", {}, {"data.train.limit": 5}),
    ("data.mix", {}, {"data.mix": [OTHER_DATA]}),
    ("data.mix", {"data.mix": [OTHER_DATA]}, {"data.mix.0.weight": 2}),
    ("data.format", {}, {"data.format": "text"}),
    ("data.template", {}, {"data.template": "{prompt}!"}),
    ("data.systemPrompt", {}, {"data.systemPrompt": "x"}),
    ("data.chatTemplateArguments", {}, {"data.chatTemplateArguments": {"a": True}}),
    (
        "data.chatTemplateArguments",
        {"data.chatTemplateArguments": {"a": {"b": 1}}},
        {"data.chatTemplateArguments.a": 2},
    ),
    ("algorithm.type", {}, {"algorithm.type": "rloo"}),
    ("service.maxRank", SERVICE, {"service.maxRank": 8}),
    ("service", SERVICE, {"service": MISSING, "data": smallest()["spec"]["data"], "rewards": [REWARD]}),
    ("schedule.seed", {}, {"schedule.seed": 1}),
    ("data.train", WARM | {"schedule.steps": 5}, {"data.train": MISSING, "rewards": MISSING}),
    ("data.train", {}, {"data.train.subset": "main"}),
    ("data.warmStart", WARM, {"data.warmStart.source": "/other.jsonl"}),
    ("schedule.warmStart.steps", {}, WARM),
    ("schedule.warmStart.steps", WARM, {"schedule.warmStart.steps": 6}),
    ("managedBy", {}, {"managedBy": "kueue.x-k8s.io/multikueue"}),
    ("trainer.lora", {}, {"trainer.lora": {}}),
    ("trainer.lora", {"trainer.lora": {"rank": 8}}, {"trainer.lora.rank": 16}),
    ("trainer.replicas", {}, {"trainer.replicas": 2}),
    ("trainer.gpusPerReplica", {}, {"trainer.gpusPerReplica": 2}),
    ("rollout.placement", {}, SHARED),
    ("rollout.placement", SHARED, {"rollout.placement": "separate"}),
    ("rewards", SHARED | {"rewards.0": IN_TRAINER}, {"rewards.0.model.source": "/other"}),
    ("rewards", SHARED | {"rewards.0": JUDGE_IN_TRAINER}, {"rewards.0.judge.model.placement": "separate"}),
    ("agent", SHARED | JOB_WITH_USER_IN_TRAINER, {"agent.user.model.model.source": "/other"}),
    ("agent", SHARED | JOB_WITH_USER_IN_TRAINER, {"agent.user.model.model.placement": "separate"}),
    ("rollout.replicas", IN_KUEUE, {"rollout.replicas": 2}),
    ("rewards", IN_KUEUE, {"rewards.0.replicas": 2}),
    ("rewards", IN_KUEUE, {"rewards.0.autoscaling": {"maxReplicas": 2}}),
    ("rewards", IN_KUEUE, {"rewards": [REWARD, REWARD | {"name": "second"}]}),
    ("agent.type", {"data.format": "chat"}, WITH_AGENT),
    ("agent.type", WITH_AGENT, {"agent": {}}),
    ("agent", IN_KUEUE | WITH_AGENT, {"agent.user.replicas": 2}),
    ("agent", IN_KUEUE | WITH_AGENT, {"agent.tools.0.replicas": 2}),
    ("agent", IN_KUEUE | WITH_AGENT, {"agent.tools": [TOOL, TOOL | {"name": "search"}]}),
    ("agent", IN_KUEUE | WITH_AGENT, {"agent.user": MISSING}),
    ("agent.type", PROGRAM, ENVIRONMENT),
    ("agent", IN_KUEUE | PROGRAM, {"agent.runner.replicas": 2}),
    ("agent", IN_KUEUE | ENVIRONMENT, {"agent.runner": {"replicas": 2}}),
    ("agent", IN_KUEUE | PROGRAM, {"agent.runner.autoscaling": {"maxReplicas": 2}}),
    ("agent", IN_KUEUE | WITH_SCALED_AGENT, {"agent.user.autoscaling": MISSING}),
]


def specs_below(annotation: Any, seen: dict[type[Spec], None]) -> dict[type[Spec], None]:
    """Return every type that an object contains."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        if annotation not in seen:
            seen[annotation] = None
            for field in annotation.model_fields.values():
                specs_below(field.annotation, seen)
    else:
        for argument in get_args(annotation):
            specs_below(argument, seen)
    return seen


ALL_SPECS = list(specs_below(RLJob, specs_below(RewardModel, {})))


def rules_for(type_name: str, beginning: str) -> list[Any]:
    part = next(spec for spec in ALL_SPECS if spec.__name__ == type_name)
    return [rule for rule in part.RULES if rule.message.startswith(beginning)]


def offline(manifest: dict[str, Any]) -> str:
    """Return the error of rljob_api for a manifest; empty if it is valid."""
    try:
        load_manifests(json.dumps(manifest), "job.yaml")
    except InvalidManifestError as error:
        return str(error)
    return ""


class Server:
    """Dry runs on the API server; only `create` stores anything."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.objects, self.namespace = client.CustomObjectsApi(api), namespace

    def verdict(self, manifest: dict[str, Any]) -> str:
        return self._message_of(lambda: self.create(manifest, dry_run="All"))

    def create(self, manifest: dict[str, Any], **options: Any) -> dict[str, Any]:
        plural = f"{manifest['kind'].lower()}s"
        return self.objects.create_namespaced_custom_object(  # type: ignore[no-any-return]
            GROUP, VERSION, self.namespace, plural, manifest, field_validation="Strict", **options
        )

    def update_verdict(self, manifest: dict[str, Any]) -> str:
        def replace() -> Any:
            return self.objects.replace_namespaced_custom_object(
                GROUP, VERSION, self.namespace, "rljobs", manifest["metadata"]["name"], manifest, dry_run="All"
            )

        return self._message_of(replace)

    @staticmethod
    def _message_of(call: Any) -> str:
        try:
            call()
        except client.ApiException as error:
            if error.status not in (400, 422):
                raise  # not about the manifest
            return str(json.loads(error.body)["message"])
        return ""


@pytest.fixture(scope="module")
def server(api_client, crds):
    """For dry runs."""
    return Server(api_client, "default")


@pytest.fixture
def storing_server(api_client, namespace):
    return Server(api_client, namespace)


def test_every_rule_of_the_types_has_a_case():
    rules = {(spec.__name__, rule.message, rule.fields) for spec in ALL_SPECS for rule in spec.RULES}
    cases = {
        (type_name, rule.message, rule.fields)
        for type_name, beginning, _, _ in VIOLATIONS
        for rule in rules_for(type_name, beginning)
    }
    assert rules == cases, "add a case to VIOLATIONS, or remove one whose rule was deleted"
    per_rule = [(type_name, beginning) for type_name, beginning, _, _ in VIOLATIONS]
    shared = {key for key in per_rule if len(rules_for(*key)) != per_rule.count(key)}
    assert not shared, "rules with the same beginning need a case each"
    immutable = {(spec.__name__, rule.field) for spec in ALL_SPECS for rule in spec.CLUSTER_RULES}
    covered = {("RLJobSpec", field) for field, _, _ in IMMUTABLE_CASES} | {
        (name, "source")
        for name in (
            *("Model", "DataSource", "TrainSource", "MixedSource", "GivenSource", "ServedModel", "ModelReward"),
            "TeacherModel",
        )
    }
    covered |= {("ChatTemplate", "file"), ("Tracking", "custom")}
    assert immutable == covered, "add a case to IMMUTABLE_CASES or to the test of relative paths"


@pytest.mark.parametrize(
    ("type_name", "beginning", "kind", "changes"), VIOLATIONS, ids=[f"{case[0]} {case[1]}" for case in VIOLATIONS]
)
def test_rule_violation_is_rejected_by_both_with_its_remedy(server, type_name, beginning, kind, changes):
    manifest = put_all(smallest(kind), changes)
    message, offline_error = server.verdict(manifest), offline(manifest)
    rules = rules_for(type_name, beginning)
    assert any(rule.message in offline_error and rule.remedy in offline_error for rule in rules), offline_error
    if any(rule.cel for rule in rules):
        assert any(f"{rule.message}; {rule.remedy}" in message for rule in rules), (
            message or "the API server accepted it"
        )
    else:
        assert "Duplicate value" in message, message or "the API server accepted it"


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards.0": JUDGE_IN_TRAINER},
        {"rewards.0": TEACHER_IN_TRAINER},
        CHAT | {"agent": {"type": "loop", "user": USER_IN_TRAINER}},
        SHARED_GPU | {"rewards.0.model.gpuMemoryUtilization": 0.8},
        SHARED_GPU | {"rewards.0.model.gpusPerReplica": 2},
    ],
)
def test_each_model_in_the_trainers_pods_is_seen_by_both(server, changes):
    manifest = put_all(smallest(), changes)
    assert server.verdict(manifest) != ""
    assert offline(manifest) != ""


@pytest.mark.parametrize(
    "changes",
    [
        SHARED_GPU,
        SHARED_GPU | {"rollout.gpuMemoryUtilization": 0.8},
        SHARED | {"rewards.0": JUDGE_IN_TRAINER},
        SHARED | {"rewards.0": TEACHER_IN_TRAINER},
        SHARED | CHAT | {"agent": {"type": "loop", "user": USER_IN_TRAINER}},
    ],
)
def test_models_in_the_trainers_pods_are_accepted_by_both(server, changes):
    manifest = put_all(smallest(), changes)
    assert server.verdict(manifest) == offline(manifest) == ""


ZERO = {"rewards.0.weight": 0}
NO_REWARD: dict[str, Any] = {"rewards": []}
ALL_ROWS: dict[str, Any] = {"data.train": ROWS, "data.mix": [OTHER_ROWS], "data.eval": ROWS | {"limit": 8}}
AGENTS: list[tuple[bool, dict[str, Any]]] = [
    (True, {"agent": {}}),
    (False, {"agent": {}} | NO_REWARD),
    (False, {"rewards": MISSING}),
    (True, PROGRAM),
    (True, PROGRAM | NO_REWARD),
    (True, PROGRAM | ALL_ROWS),
    (True, ENVIRONMENT | ALL_ROWS),
    (False, {"data.mix": [OTHER_ROWS]}),
    (False, {"evaluation.sets": [{"name": "math", "data": ROWS}]}),
    (False, CHAT | {"agent": RUN_COMMAND, "data.eval": ROWS}),
    (True, PROGRAM | {"rewards": MISSING}),
    (True, PROGRAM | ZERO),
    (True, PROGRAM | {"agent.rewardWeight": 0}),
    (False, PROGRAM | {"agent.rewardWeight": 0} | ZERO),
    (False, PROGRAM | {"agent.rewardWeight": 0} | NO_REWARD),
    (False, WITH_AGENT | NO_REWARD),
    (False, WITH_AGENT | ZERO),
    (False, PROGRAM | {"data.format": "text"}),
    (True, PROGRAM | {"rewards.0.use": "training", "data.eval": {"source": "hf://org/data"}}),
    (True, PROGRAM | {"agent.models": [OTHER_MODEL]}),
    (True, PROGRAM | {"agent.runner.command": []}),
    (True, PROGRAM | {"agent.runner": {"command": ["agent"]}}),
    (True, PROGRAM | {"agent.runner": {"command": ["agent"], "workingDir": "/app"}}),
    (False, PROGRAM | {"agent.runner": {"command": [], "workingDir": "/app"}}),
    (False, PROGRAM | {"agent.runner": {"command": []}}),
    (False, PROGRAM | {"agent.runner": {}}),
    (False, PROGRAM | {"agent.user": FUNCTION}),
    (False, PROGRAM | {"agent.tools": [TOOL]}),
    (False, PROGRAM | {"agent.environment": TRL}),
    (False, PROGRAM | {"agent.runner.timeoutSeconds": 0}),
    (False, PROGRAM | {"agent.runner.function": {"entrypoint": "run"}}),
    (True, ENVIRONMENT),
    (True, ENVIRONMENT | NO_REWARD),
    (True, ENVIRONMENT | {"agent.runner": {"slots": 2}}),
    (True, ENVIRONMENT | {"agent.runner": {"command": []}}),
    (True, ENVIRONMENT | {"agent.runner": FUNCTION, "agent.environment": {"framework": "trl"}}),
    (False, ENVIRONMENT | {"agent.environment": {"framework": "trl"}}),
    (False, ENVIRONMENT | {"agent.runner": {}, "agent.environment": {"framework": "trl"}}),
    (False, ENVIRONMENT | {"agent.runner": {"command": ["agent"]}}),
    (False, ENVIRONMENT | {"agent.environment": {"id": "envs:Guess"}}),
    (True, ENVIRONMENT | {"agent.environment.framework": "my-plugin"}),
    (False, ENVIRONMENT | {"agent.environment.framework": "my plugin"}),
    (False, ENVIRONMENT | {"rewards.0.name": "runner"}),
    (False, ENVIRONMENT | {"data.format": "text"}),
    (False, {"agent": {"environment": TRL}}),
    (False, WITH_AGENT | {"agent.environment": TRL}),
    (False, WITH_AGENT | {"agent.runner": FUNCTION}),
    (True, {"rewards.0.name": "runner"}),
]


@pytest.mark.parametrize(("is_valid", "changes"), AGENTS)
def test_types_of_agents_are_accepted_and_rejected_by_both(server, is_valid, changes):
    manifest = put_all(smallest(), changes)
    message, offline_error = server.verdict(manifest), offline(manifest)
    assert (not message, not offline_error) == (is_valid, is_valid), f"{message or '-'} | {offline_error or '-'}"
    assert "no such key" not in message, "a rule reads a field that is not set"


def test_job_that_an_earlier_version_stored_is_valid_and_may_change(storing_server):
    """It has a reward, and the turns that were the default."""
    stored = storing_server.create(put_all(smallest(), WITH_AGENT | {"agent.maxAssistantTurns": 8}))
    assert storing_server.update_verdict(put(stored, "schedule.steps", 500)) == ""
    assert storing_server.update_verdict(put(stored, "rewards", [])) != ""


SOURCES = ("model.source", "data.train.source", "data.mix.0.source", "data.warmStart.source", "data.eval.source")


@pytest.mark.parametrize("path", SOURCES)
def test_relative_path_is_rejected_by_a_cluster_and_by_the_operator(server, path):
    from rljob_core.plan.validate import find_problems

    manifest = put(put_all(smallest(), WARM | {"data.mix": [OTHER_DATA]}), path, "./relative")
    assert "`rljob run` and `submit`" in server.verdict(manifest)
    assert offline(manifest) == "", "`rljob run` accepts it"
    assert f"spec.{path}".replace(".0", "[0]") in " ".join(find_problems(RLJob.model_validate(manifest)))


def test_file_of_a_chat_template_is_for_the_commands_alone(server):
    manifest = put(smallest(), "model.chatTemplate", {"file": "template.jinja"})
    assert "file works only with `rljob run` and `rljob submit`" in server.verdict(manifest)
    assert offline(manifest) == "", "`rljob run` accepts it"


def test_a_tracker_from_a_file_is_for_rljob_run_alone(server):
    manifest = put(smallest(), "tracking", {"custom": "tracker.py:start"})
    assert "custom names a file, which only `rljob run` reads" in server.verdict(manifest)
    assert offline(manifest) == "", "`rljob run` accepts it"
    assert server.verdict(put(smallest(), "tracking", {"custom": "trackers.swan:start"})) == ""


def test_variables_of_a_chat_template_are_stored_as_they_are(server):
    arguments = {"enable_thinking": False, "reasoning_effort": "low", "budget": 0.5, "names": ["a", {"b": None}]}
    manifest = put(smallest(), "data.chatTemplateArguments", arguments)
    assert server.create(manifest, dry_run="All")["spec"]["data"]["chatTemplateArguments"] == arguments


def test_temperature_that_is_null_is_not_filled_in(server):
    reward = {"name": "judged", "judge": judge(votes=3, sampling={"temperature": None})}
    manifest = put(smallest(), "rewards", [reward])
    assert server.verdict(manifest) == offline(manifest) == ""
    stored = server.create(manifest, dry_run="All")["spec"]["rewards"][0]
    assert RLJob.model_validate(put(smallest(), "rewards", [stored])).spec.rewards[0].judge.sampling.temperature is None


@pytest.mark.parametrize("sampling", [{}, {"maxTokens": None}, {"maxTokens": 8}])
def test_length_that_the_model_decides_may_be_left_out(server, sampling):
    changes = {"rollout": {"maxModelLen": 64, "sampling": sampling}, "evaluation": {"sampling": {}}}
    manifest = put_all(smallest(), changes)
    assert server.verdict(manifest) == offline(manifest) == ""
    stored = server.create(manifest, dry_run="All")
    assert stored["spec"]["rollout"]["sampling"].get("maxTokens") == sampling.get("maxTokens")


@pytest.mark.parametrize(("field", "before", "after"), IMMUTABLE_CASES)
def test_change_of_an_immutable_field_is_rejected_with_its_remedy(storing_server, field, before, after):
    stored = storing_server.create(put_all(smallest(), before))
    message = storing_server.update_verdict(put_all(stored, after))
    while_suspended = ("trainer.replicas", "trainer.gpusPerReplica", "rollout.placement")
    suspendable = field in while_suspended or IN_KUEUE.items() <= before.items() or SHARED.items() <= before.items()
    remedy = "set suspend: true first" if suspendable else "create a new RLJob instead"
    assert f"{field} is immutable" in message, message or "the API storing_server accepted the change"
    assert remedy in message


SCALED = {"name": "scaled", "function": {"inline": INLINE}, "autoscaling": {"maxReplicas": 2}}
SERVED_ELSEWHERE = {"name": "elsewhere", "http": {"url": "https://x"}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (IN_KUEUE, {"schedule.steps": 500}),
        (SERVICE, {"service.clients": ["ann"], "service.maxAdapters": 2, "trainer.env": {"A": "b"}}),
        (IN_KUEUE | {"suspend": True}, {"rollout.replicas": 2, "rewards.0.replicas": 2}),
        (IN_KUEUE, {"rewards": [REWARD, SCALED, SERVED_ELSEWHERE]}),
        (IN_KUEUE | {"rewards": [REWARD, SCALED]}, {"rewards": [REWARD, SCALED | {"replicas": 3}]}),
        ({}, {"rollout.replicas": 2, "rewards.0.replicas": 2}),
        (SHARED | JOB_WITH_USER_IN_TRAINER, {"agent.user.slots": 4}),
        (SHARED | JOB_WITH_USER_IN_TRAINER | {"suspend": True}, {"agent.user.model.model.source": "/other"}),
        (IN_KUEUE | WITH_AGENT, {"agent.user.slots": 4, "agent.tools.0.timeoutSeconds": 3}),
        (IN_KUEUE | WITH_AGENT | {"suspend": True}, {"agent.user.replicas": 2, "agent.tools": []}),
        (IN_KUEUE | PROGRAM, {"agent.runner.slots": 4}),
        (IN_KUEUE | PROGRAM | {"suspend": True}, {"agent.runner.replicas": 2}),
        (IN_KUEUE | ENVIRONMENT, {"agent.runner": {"slots": 4}}),
        (IN_KUEUE | WITH_SCALED_AGENT, {"agent.user.replicas": 3, "agent.tools.0.autoscaling.maxReplicas": 9}),
        (IN_KUEUE | SCALED_PROGRAM, {"agent.runner.replicas": 3, "agent.runner.autoscaling.minReplicas": 0}),
    ],
)
def test_pods_that_are_not_in_a_group_of_kueue_may_be_scaled(storing_server, before, after):
    stored = storing_server.create(put_all(smallest(), before))
    assert storing_server.update_verdict(put_all(stored, after)) == ""


def test_model_in_the_trainers_pods_leaves_its_reward_free_to_change(storing_server):
    stored = storing_server.create(put_all(smallest(), SHARED | {"rewards.0": IN_TRAINER | {"slots": 2}}))
    assert storing_server.update_verdict(put_all(stored, {"rewards.0.slots": 4, "rewards.0.weight": 2})) == ""


@pytest.mark.parametrize("change", [{"trainer.replicas": 2}, {"trainer.gpusPerReplica": 2}, SHARED])
def test_trainer_of_a_suspended_job_may_be_resized_or_shared(storing_server, change):
    stored = storing_server.create(put(smallest(), "suspend", True))
    assert storing_server.update_verdict(put_all(stored, change)) == ""


def test_rollouts_that_share_the_trainer_keep_their_settings(server):
    """Also with the defaults of the fields that must be left out, as the API server stores them."""
    rollout = SHARED | {"trainer.gpusPerReplica": 4, "rollout.gpusPerReplica": 2, "rollout.gpuMemoryUtilization": 0.5}
    manifest = put_all(smallest(), rollout | {"rollout.extraArgs": ["--x"], "rollout.nodePool": {"exclusive": False}})
    assert server.verdict(manifest) == offline(manifest) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"schedule.steps": 500},
        {"rollout.replicas": 3},
        {"rewards.0.replicas": 2},
        {"suspend": True},
        {"trainer.resources": {"requests": {"cpu": "2"}}},
        {"priorityClassName": "high"},
        {"runtimeClassName": "gvisor"},
        {"serviceAccountName": "trainer"},
        {"imagePullSecrets": [{"name": "registry"}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_mutable_field_may_change_while_a_job_runs(storing_server, change):
    stored = storing_server.create(smallest())
    assert storing_server.update_verdict(put_all(stored, change)) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"agent.user.replicas": 3},
        {"agent.tools.0.replicas": 3},
        {"agent.user.function.inline": "def respond(): ..."},
        {"agent.maxUserTurns": 2},
        {"agent.user": MISSING},
        {"agent.tools": [TOOL | {"name": "search"}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_agent_may_change_while_a_job_runs(storing_server, change):
    stored = storing_server.create(put_all(smallest(), WITH_AGENT))
    assert storing_server.update_verdict(put_all(stored, change)) == ""


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", MODELS)
def test_api_server_stores_no_defaults_but_the_replicas_that_scale_reads(server, kind):
    stored = server.create(smallest(kind), dry_run="All")
    replicas = {"RLJob": {"rollout": {"replicas": 1}}, "RewardModel": {"replicas": 1}}
    assert stored["spec"] == smallest(kind)["spec"] | replicas[kind]


def test_fixed_field_may_be_written_with_its_default_and_left_out_again(storing_server):
    """As `kubectl replace` does with an object into which an earlier API server had written its defaults."""
    minimal = put(smallest(), "trainer.lora", {})
    filled = RLJob.model_validate(minimal).to_manifest()["spec"]
    stored = storing_server.create(minimal)
    assert storing_server.update_verdict(stored | {"spec": filled}) == ""
    assert storing_server.update_verdict(stored | {"spec": minimal["spec"]}) == ""
    assert "model is immutable" in storing_server.update_verdict(put(stored, "model.trustRemoteCode", True))


@pytest.mark.parametrize("path", ["data.train.answer", "algorithm.optimizer.maxGradNorm"])
def test_null_that_disables_a_setting_is_stored(server, path):
    stored = server.create(put(smallest(), path, None), dry_run="All")
    *way, last = path.split(".")
    holder = stored["spec"]
    for part in way:
        holder = holder[part]
    assert holder.get(last, "a default came back") is None


@pytest.mark.parametrize("path", ["rolout", "trainer.gpuPerReplica", "rewards.0.function.inlin", "data.train.promt"])
def test_unknown_field_is_rejected_by_both(server, path):
    manifest = put(smallest(), path, 1)
    assert f'unknown field "spec.{path.replace(".0.", "[0].")}"' in server.verdict(manifest)
    assert "is unknown; did you mean" in offline(manifest)


@pytest.mark.parametrize("name", ["A", "1st", "a" * 41, "a_b", "a."])
def test_name_without_room_for_suffixes_is_rejected_by_both(server, name):
    manifest = smallest(name=name)
    assert "metadata.name" in server.verdict(manifest)
    assert "metadata.name" in offline(manifest)


def bounds_of(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (path, keyword, a value just outside) for every bound of a schema."""
    for key, inner in schema.get("properties", {}).items():
        yield from bounds_of(inner, f"{path}.{key}".lstrip("."))
    if "items" in schema:
        yield from bounds_of(schema["items"], f"{path}.0")
    for keyword, step in (("minimum", -1), ("maximum", 1)):
        if keyword in schema:
            bound = schema[keyword]
            exclusive = schema.get(f"exclusive{keyword.capitalize()}")
            yield path, keyword, bound if exclusive else bound + step
    if "enum" in schema:
        yield path, "enum", max(schema["enum"]) + 1 if schema["type"] == "integer" else "nonsense"
    if "pattern" in schema:
        yield path, "pattern", " " if schema["pattern"] == r"\S" else "-?"
    if schema.get("minLength"):
        yield path, "minLength", ""
    if "maxLength" in schema:
        yield path, "maxLength", "a" * (schema["maxLength"] + 1)
    if schema.get("minItems"):
        yield path, "minItems", []
    if "maxItems" in schema:
        yield path, "maxItems", [example(schema["items"])] * (schema["maxItems"] + 1)
    if "maxProperties" in schema:
        yield path, "maxProperties", {f"k{i}": "1" for i in range(schema["maxProperties"] + 1)}


def example(schema: dict[str, Any]) -> Any:
    """Return a value of a schema, with all required fields."""
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            return {key: example(schema["properties"][key]) for key in schema.get("required", [])}
        case "array":
            return []
        case "integer" | "number":
            return schema.get("minimum", 0) + 1
        case "boolean":
            return False
    return "https://x" if "http" in schema.get("pattern", "") else "x"


SPEC_SCHEMAS = {kind: build_object_schema(model)["properties"]["spec"] for kind, model in MODELS.items()}
BOUNDS = [(kind, *bound) for kind, schema in SPEC_SCHEMAS.items() for bound in bounds_of(schema)]


def put_with_required_siblings(kind: str, path: str, value: Any) -> dict[str, Any]:
    """Return the minimal manifest with a nested value and its required siblings."""
    manifest, schema, way = smallest(kind), SPEC_SCHEMAS[kind], ""
    for part in path.split(".")[:-1]:
        schema = schema["items"] if part == "0" else schema["properties"][part]
        way = f"{way}.{part}".lstrip(".")
        for key in schema.get("required", []):
            if not has(manifest["spec"], f"{way}.{key}"):
                manifest = put(manifest, f"{way}.{key}", example(schema["properties"][key]))
    return put(manifest, path, value)


def has(holder: Any, path: str) -> bool:
    for part in path.split("."):
        if part == "0":
            if not holder:
                return False
            holder = holder[0]
        elif part in holder:
            holder = holder[part]
        else:
            return False
    return True


@pytest.mark.parametrize(
    ("kind", "path", "keyword", "value"), BOUNDS, ids=[f"{kind}-{path}-{keyword}" for kind, path, keyword, _ in BOUNDS]
)
def test_value_out_of_bounds_is_rejected_by_both_with_its_field(server, kind, path, keyword, value):
    manifest = put_with_required_siblings(kind, path, value)
    named = f"spec.{path}".replace(".0", "[0]")
    message, offline_error = server.verdict(manifest), offline(manifest)
    assert named in message, message or "the API server accepted it"
    assert named in offline_error, offline_error or "rljob validate accepted it"


EXAMPLES = sorted([*ROOT.glob("examples/*/rljob.yaml"), *ROOT.glob("examples/gpu/*.yaml")])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_example_is_rejected_at_most_for_its_relative_paths(server, path):
    for manifest in fast_yaml.load_all(path.read_text()):
        message = server.verdict(manifest)
        assert message == "" or "`rljob run` and `submit`" in message, message
