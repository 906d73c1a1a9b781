from __future__ import annotations

import re
from pathlib import Path

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.read.load import InvalidManifestError, load_job, load_manifests

GOOD = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: sums}
spec:
  model: {source: ../model}
  data:
    train: {source: train.jsonl}
  rewards:
  - name: correct
    function: {file: reward.py}
  schedule: {steps: 1, promptsPerStep: 8}
"""


def problems_of(text: str) -> list[str]:
    with pytest.raises(InvalidManifestError) as caught:
        load_manifests(text, "job.yaml")
    return str(caught.value).splitlines()


def test_load_returns_the_type_of_a_valid_manifest() -> None:
    (job,) = load_manifests(GOOD, "job.yaml")
    assert isinstance(job, RLJob)
    assert job.spec.schedule.prompts_per_step == 8


def test_load_returns_all_manifests_of_a_file() -> None:
    reward = (
        "---\napiVersion: rljob.dev/v1alpha1\nkind: RewardModel\nmetadata: {name: r}\nspec: {http: {url: http://x}}\n"
    )
    assert [type(manifest) for manifest in load_manifests(GOOD + reward, "x")] == [RLJob, RewardModel]


# Text added to GOOD's spec, and the single expected line.
ADDED = [
    ("rollout: {replicas: -1}", "spec.rollout.replicas must be at least 0, got -1"),
    ("rollout: {sampling: {topP: 0.9}}", "spec.rollout.sampling.topP must be 1 for training: otherwise vLLM's "
     "log-probs cover fewer tokens than the trainer's, got 0.9; remove it; evaluation.sampling may have it"),
    ("rollout: {sampling: {topK: 20}}", "spec.rollout.sampling.topK must be 0 for training: otherwise vLLM's "
     "log-probs cover fewer tokens than the trainer's, got 20; remove it; evaluation.sampling may have it"),
    ("rollout: {replica: 2}", "spec.rollout.replica is unknown; did you mean replicas?"),
    ("trainer: {gpus_per_replica: 2}", "spec.trainer.gpus_per_replica is unknown; did you mean gpusPerReplica?"),
    ("trainer: {groupSize: 1}", "spec.trainer.groupSize is unknown here; groupSize belongs in spec.algorithm"),
    ("algorithm: {persona: x}", "spec.algorithm.persona is unknown here; persona belongs in spec.agent.user.model"),
    ("algorithm: {learningRate: 1}", "spec.algorithm.learningRate is unknown; known fields are type, groupSize, loss, "
     "advantages, kl, entropyCoefficient, correction, truncated, dynamicSampling, zeroStdThreshold, optimizer, "
     "turnRewards, ..."),
    ("checkpoint: {xyz: 1}", "spec.checkpoint.xyz is unknown; known fields are persistentVolumeClaim, storage, "
     "everySteps, keep, asynchronous, exportPolicy, export"),
    ("checkpoint: {exportPolicy: false}",
     "spec.checkpoint.exportPolicy must be one of never, last, best, every, got false"),
    ("checkpoint: {export: 1}",
     'spec.checkpoint.export must be one of never, last, best, every, true, false, got "1": The name of '
     "exportPolicy before 0.2.0, read where that is absent: a choice of exportPolicy, or ..."),
    ("checkpoint: {exportPolicy: best}",
     "spec.checkpoint.exportPolicy must not be best without evaluation.best, got best; "
     "set evaluation.best, or use last"),
    ("trainer: {dtype: bf16}", 'spec.trainer.dtype must be one of bfloat16, float16, float32, got "bf16"; '
     "did you mean bfloat16?"),
    ("trainer: {replicas: 1.5}", "spec.trainer.replicas must be a whole number, got 1.5"),
    ('trainer: {replicas: "2"}', 'spec.trainer.replicas must be a whole number, got "2"; write it without quotes'),
    ("trainer: {replicas: }", "spec.trainer.replicas must be a whole number, got nothing"),
    ("trainer: {env: {A: 1}}", "spec.trainer.env.A must be text, got 1; put it in quotes"),
    ("trainer: {env: {RLJOB_TOKEN: x}}", "spec.trainer.env must not set names that begin with RLJOB_: they are "
     "reserved; choose another name"),
    ("trainer: [1]", "spec.trainer must be a mapping (name: value), got a list of 1"),
    ("suspend: 1", "spec.suspend must be true or false, got 1"),
    ("trainer: {resources: {limits: {cpu: 1x}}}", "spec.trainer.resources.limits.cpu must be a Kubernetes quantity "
     'such as 500m, 2 or 16Gi, got "1x"'),
    ("trainer: {nodePool: {topology: {key: a b}}}", "spec.trainer.nodePool.topology.key must be the key of a label "
     'such as topology.kubernetes.io/zone, got "a b"'),
    ("trainer: {nodePool: {topology: {}}}", "spec.trainer.nodePool.topology.key is required: Label of nodes. "
     "Those with the same value are one domain, as with `nvidia.com/gpu.clique` (NVLink)"),
    ("trainer: {nodePool: {gpuResource: gpu}}", "spec.trainer.nodePool.gpuResource must be the name of a device such "
     'as nvidia.com/gpu: DOMAIN/NAME, got "gpu"'),
    ("activeDeadlineSeconds: 999999999999", "spec.activeDeadlineSeconds must be at most 1000000000, got 999999999999"),
    ("algorithm: {optimizer: {beta1: 1}}", "spec.algorithm.optimizer.beta1 must be less than 1, got 1"),
    ("algorithm: {optimizer: {learningRate: .inf}}", "spec.algorithm.optimizer.learningRate must be a finite number, "
     "got inf"),
    ("rollout: {sampling: {stop: x}}", "spec.rollout.sampling.stop must be a list (lines that begin with '-'), got "
     '"x"'),
    ("evaluation: {everySteps: 2}", "spec.evaluation.everySteps must be 0 without data.eval and evaluation.sets, got "
     "2; add data.eval, or remove everySteps"),
    ("checkpoint: {storage: runs}", "spec.checkpoint.storage must be a prefix in object storage, such as "
     's3://bucket/runs, got "runs"'),
    ("checkpoint: {storage: 's3://bucket/a/../b'}", "spec.checkpoint.storage must be a prefix in object storage, such "
     'as s3://bucket/runs, got "s3://bucket/a/../b"'),
    ("checkpoint: {storage: 's3://bucket/runs', persistentVolumeClaim: {claimName: runs}}",
     "spec.checkpoint.storage must not be set next to persistentVolumeClaim, got s3://bucket/runs; remove one of them"),
    ("checkpoint: {persistentVolumeClaim: {}}", "spec.checkpoint.persistentVolumeClaim.claimName is required: Name of "
     "the PersistentVolumeClaim"),
    ("rollout: {replicas: 0}", "spec.rollout.replicas must be at least 1 unless the job is suspended, got 0; set it "
     "to 1 or more, or suspend: true"),
]  # fmt: skip


@pytest.mark.parametrize(("added", "expected"), ADDED)
def test_an_invalid_added_field_is_reported_with_path_and_remedy(added: str, expected: str) -> None:
    assert problems_of(f"{GOOD}  {added}\n") == [f"job.yaml:12: {expected}"]


# Text of GOOD to replace, its replacement, and the single expected line.
REPLACED = [
    ("steps: 1", "miniBatches: 3", "job.yaml:11: spec.schedule.miniBatches must divide schedule.promptsPerStep, got 3 "
     "(schedule.promptsPerStep is 8); change either"),
    ("file: reward.py", "file: a.py, inline: x", "job.yaml:10: spec.rewards[0].function must have exactly one of "
     "inline, file, configMapKeyRef, module; set one and remove the others"),
    ("../model", "ftp://host/model", "job.yaml:5: spec.model.source must be hf://org/name, pvc://claim/path, "
     "s3://bucket/path, job://NAME@STEP or a path, got ftp://host/model; correct the scheme; a step is a number, last "
     "or best"),
    ("name: sums", "name: My_Sums", "job.yaml:3: metadata.name must be lower-case letters, digits and '-', and begin "
     'with a letter, got "My_Sums"'),
    ("name: sums", "names: x", "job.yaml:3: metadata.name is required: Name of the object: a DNS label of at most 40 "
     "characters that begins with a letter. Children ..."),
    ("train: {source", "train: {sorce", "job.yaml:7: spec.data.train.sorce is unknown; did you mean source?"),
    ("kind: RLJob", "kind: RLJobPolicy", "job.yaml:2: kind must be RLJob or RewardModel, got RLJobPolicy; `rljob "
     "validate JOB.yaml --policy FILE` checks a policy, and what it means for a job"),
    ("kind: RLJob", "kind: RlJobs", 'job.yaml:2: kind must be RLJob or RewardModel, got "RlJobs"; did you mean RLJob?'),
    ("kind: RLJob\n", "", "job.yaml:1: kind is required; write kind: RLJob or RewardModel"),
    ("v1alpha1", "v1", 'job.yaml:1: apiVersion must be rljob.dev/v1alpha1, got "rljob.dev/v1"'),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), REPLACED)
def test_an_invalid_replacement_is_reported_at_its_line(old: str, new: str, expected: str) -> None:
    assert old in GOOD
    assert problems_of(GOOD.replace(old, new)) == [expected]


def test_problems_of_all_kinds_are_reported_together_in_line_order() -> None:
    text = (
        GOOD.replace("../model", "ftp://x")
        .replace("name: correct", "name: Correct")
        .replace("steps: 1", 'steps: "1", miniBatches: 3')
    )
    found = problems_of(f"{text}  rollout:\n    replicas: -1\n    replicas: 0\n    group_size: 4\n")
    assert [line.split(": ")[0] for line in found] == [f"job.yaml:{n}" for n in (5, 9, 11, 11, 14, 14, 15)]
    assert "miniBatches must divide" in "".join(found), "rules are checked although other fields are invalid"


def test_rules_over_invalid_fields_are_skipped() -> None:
    (problem,) = problems_of(GOOD.replace("promptsPerStep: 8", "promptsPerStep: many, miniBatches: 3"))
    assert "promptsPerStep must be a whole number" in problem


def test_missing_required_fields_do_not_hide_other_rules() -> None:
    text = GOOD.replace("name: correct\n    function", "function").replace("steps: 1", "miniBatches: 3")
    assert len(problems_of(text)) == 2


@pytest.mark.parametrize("text", ["", "---\n---\n", "# nothing\n"])
def test_an_empty_file_is_rejected(text: str) -> None:
    assert problems_of(text) == ["job.yaml:1: is empty; it must contain an RLJob or a RewardModel"]


@pytest.mark.parametrize("text", ["- 1\n", "text\n", "a: &a {b: *a}\n", "? [1, 2]\n: 3\n", "spec: [\n"])
def test_yaml_other_than_manifests_is_rejected(text: str) -> None:
    assert problems_of(text)


@pytest.mark.parametrize(
    "value", ["!!set {a, b}", "!!binary aGVsbG8=", "!!omap [a: 1]", "!!timestamp 2026-01-01", "[" * 1000, "9" * 5000]
)
def test_values_outside_json_are_rejected(value: str) -> None:
    [problem] = problems_of(f"{GOOD}  algorithm: {value}\n")
    assert re.match(r"job\.yaml:1[23]: ", problem), "the line of the value, or the next one for text that does not end"


def test_messages_contain_no_python_names() -> None:
    text = "\n".join(line for added, _ in ADDED for line in problems_of(f"{GOOD}  {added}\n"))
    for word in ("Input should", "pydantic", "None", "NoneType", "dict", "str", "float", "Extra inputs"):
        assert not re.search(rf"\b{word}\b", text)


def test_load_job_requires_exactly_one_job(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(GOOD + "---\n" + GOOD)
    with pytest.raises(InvalidManifestError, match="exactly one RLJob, got 2"):
        load_job(file)
    file.write_text(GOOD)
    assert load_job(file).metadata.name == "sums"


def test_load_job_raises_user_error_when_the_file_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        load_job(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read: 'utf-8'"):
        load_job(tmp_path / "binary")


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("trainer: {env: {FLAG: y}}", "spec.trainer.env.FLAG must be text, got true; put it in quotes"),
        ("evaluation: {everyStep: 2}", "spec.evaluation.everyStep is unknown; did you mean everySteps?"),
        ("rollout: {replica: 2}\n  suspended: true", "spec.rollout.replica is unknown; did you mean replicas?"),
        ("miniBatches: 3", "spec.miniBatches is unknown here; miniBatches belongs in spec.schedule"),
    ],
)
def test_first_problem_names_what_the_user_wrote(added: str, expected: str) -> None:
    assert problems_of(f"{GOOD}  {added}\n")[0] == f"job.yaml:12: {expected}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("steps: 1, promptsPerStep: 8", "promtsPerStep: 9, miniBatches: 3"),
        ("{source: train.jsonl}", "{source: train.jsonl}\n    evall: {source: x}\n  evaluation: {everySteps: 2}"),
    ],
)
def test_rule_over_a_misspelled_field_is_skipped(old: str, new: str) -> None:
    assert old in GOOD
    (problem,) = problems_of(GOOD.replace(old, new))
    assert "is unknown; did you mean" in problem


def test_equal_names_of_rewards_are_named_with_their_places() -> None:
    text = GOOD.replace("  rewards:\n", "  rewards:\n  - {name: correct, function: {inline: x}}\n")
    (problem,) = problems_of(text)
    assert "must have different names, got correct in rewards[0] and rewards[1]; rename one of them" in problem
