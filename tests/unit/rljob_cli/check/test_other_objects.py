"""Objects of other kinds in a job's file."""

import pytest

from rljob_api.read.load import InvalidManifestError, load_manifests
from rljob_cli.check.jobfile import load, load_partial

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: j}
spec:
  model: {source: /m}
  data: {train: {source: /d.jsonl}}
  rewards:
  - name: r
    function: {configMapKeyRef: {name: functions, key: reward.py}}
"""
CONFIG_MAP = """\
---
apiVersion: v1
kind: ConfigMap
metadata: {name: functions}
data:
  reward.py: |
    def compute_score(data_source, solution_str, ground_truth): return 1.0
"""
SECRET = "---\napiVersion: v1\nkind: Secret\nmetadata: {name: keys}\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "job.yaml"


def test_function_comes_from_the_files_config_map(path):
    path.write_text(JOB + CONFIG_MAP + SECRET)
    file = load(path)
    function = file.job.spec.rewards[0].function
    assert (function.config_map_key_ref, function.inline.splitlines()[0][:17]) == (None, "def compute_score")
    assert [document.data["kind"] for document in file.unused] == ["Secret"]


AGENT = """\
  agent:
    type: loop
    user: {function: {inline: "x = 1"}}
    tools:
    - name: t
      function: {configMapKeyRef: {name: functions, key: tools.py}}
"""


def test_function_of_a_tool_comes_from_the_files_config_map(path):
    job = JOB.replace("/d.jsonl}}", "/d.jsonl}, format: chat}") + AGENT
    path.write_text(job + CONFIG_MAP + "  tools.py: 'def add(): ...'\n")
    file = load(path)
    assert file.job.spec.agent.tools[0].function.inline == "def add(): ..."
    path.write_text(job + CONFIG_MAP)
    (problem,) = load_partial(path).problems
    assert (problem.path, problem.line) == ("spec.agent.tools[0].function.configMapKeyRef.key", 15)


def test_reference_stays_for_a_cluster(path):
    path.write_text(JOB + CONFIG_MAP)
    assert load(path, keep_references=True).job.spec.rewards[0].function.config_map_key_ref.name == "functions"


def test_config_map_of_another_namespace_is_unused(path):
    path.write_text(JOB + CONFIG_MAP.replace("{name: functions}", "{name: functions, namespace: other}"))
    file = load(path)
    assert file.job.spec.rewards[0].function.config_map_key_ref is not None
    assert len(file.unused) == 1


def test_missing_key_is_reported_with_the_existing_ones(path):
    path.write_text(JOB + CONFIG_MAP.replace("reward.py:", "rewards.py:"))
    (problem,) = load_partial(path).problems
    assert (problem.path, problem.line) == ("spec.rewards[0].function.configMapKeyRef.key", 9)
    assert problem.message == "must be a key of the ConfigMap functions, which has rewards.py, got reward.py"


@pytest.mark.parametrize("metadata", ["{}", "{name: 3}", "text"])
def test_object_without_a_name_is_refused_as_kubectl_does(path, metadata):
    path.write_text(JOB + SECRET.replace("{name: keys}", metadata))
    (problem,) = load_partial(path).problems
    assert (problem.path, problem.message) == ("metadata.name", "is required: the name of the object")


def test_misspelled_kind_is_refused(path):
    path.write_text(JOB + "---\napiVersion: rljob.dev/v1alpha1\nkind: RewardModell\nmetadata: {name: x}\n")
    with pytest.raises(InvalidManifestError, match="did you mean RewardModel"):
        load(path)


def test_api_skips_other_objects():
    (job,) = load_manifests(JOB + CONFIG_MAP, "job.yaml")
    assert job.metadata.name == "j"
