"""Policies in files, and the problems of jobs with the lines at which they are."""

import pytest
from typer.testing import CliRunner

from rljob_api.errors import UserError
from rljob_api.manifest.policy import RLJobPolicy
from rljob_api.manifest.services.reward import RewardModel
from rljob_cli.check.jobfile import load_partial
from rljob_cli.check.tenant_policy import find_policy_problems, load_policy, read_policy
from rljob_cli.check.verdict import find_policy_problems as find_located_problems
from rljob_cli.main import app
from tests.support.job_simulation import make_job

POLICY = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJobPolicy
metadata: {name: default, namespace: research, resourceVersion: "7"}
spec:
  defaults: {queue: research}
  limits: {rolloutReplicas: 1, queues: [research]}
"""
JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: sums}
spec:
  model: {source: hf://a/b}
  data: {train: {source: hf://a/b}}
  rewards: [{name: correct, function: {inline: "def f(): ..."}}]
  rollout:
    replicas: 2
"""


def write(folder, text, name="policy.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def test_policy_of_kubectl_is_read(tmp_path):
    assert load_policy(write(tmp_path, POLICY)).spec.limits.rollout_replicas == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (POLICY.replace("rolloutReplicas", "rolloutReplica"), "policy.yaml:6: spec.limits.rolloutReplica"),
        (POLICY.replace("name: default", "name: other"), "metadata.name must be default"),
        (
            POLICY.replace("queues: [research]", "templateFields: [spec.containers, metadata.annotation]"),
            r"policy.yaml:6: spec.limits.templateFields\[1\] metadata.annotation is unknown .*did you mean annot",
        ),
        (
            POLICY.replace("queues: [research]", "templateFields: [spec.container]"),
            r"templateFields\[0\] spec.container is unknown in Kubernetes 1.37; did you mean containers",
        ),
        (POLICY + "---\n" + POLICY, "must be one RLJobPolicy, got 2 documents"),
        ("", "must be one RLJobPolicy, got 0 documents"),
    ],
)
def test_wrong_policy_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load_policy(write(tmp_path, text))


def test_missing_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_policy(tmp_path / "missing")


def test_stored_policy_with_unknown_fields_is_left_to_the_operator():
    assert read_policy({"metadata": {"name": "default"}, "spec": {"later": 1}}) is None


def test_problem_is_at_the_line_of_the_field(tmp_path):
    policy, file = load_policy(write(tmp_path, POLICY)), load_partial(write(tmp_path, JOB, "job.yaml"))
    [problem], [] = find_located_problems(file, policy)
    assert (problem.path, problem.line) == ("spec.rollout.replicas", 9)
    assert "must be at most 1, got 2 (spec.limits.rolloutReplicas of RLJobPolicy" in str(problem)
    assert find_located_problems(file, None) == ([], [])


def test_problem_of_the_whole_spec_is_at_its_line(tmp_path):
    policy = load_policy(write(tmp_path, POLICY.replace("rolloutReplicas: 1", "gpus: 1")))
    job = JOB.replace("    replicas: 2\n", "    gpusPerReplica: 4\n")
    problems, [] = find_located_problems(load_partial(write(tmp_path, job, "job.yaml")), policy)
    assert [(problem.path, problem.line) for problem in problems] == [("spec", 4)]


def test_reward_models_of_the_file_are_checked():
    policy = RLJobPolicy.model_validate({"metadata": {"name": "default"}, "spec": {"limits": {"rewardReplicas": 1}}})
    spec = {"function": {"inline": "def f(): ..."}, "replicas": 2}
    model = RewardModel.model_validate({"metadata": {"name": "shared"}, "spec": spec})
    [problem] = find_policy_problems(make_job(), {"shared": model}, policy)
    assert problem.is_certain
    assert problem.message.startswith("RewardModel shared: spec.replicas must be at most 1, got 2")


def test_node_label_that_the_installation_may_set_is_left_to_the_operator():
    spec = {"limits": {"nodeLabels": {"pool": ["cpu", "h100"]}}, "defaults": {"nodePools": {"reward": {}}}}
    policy = RLJobPolicy.model_validate({"metadata": {"name": "default"}, "spec": spec})
    assert list(find_policy_problems(make_job(), {}, policy)) == []
    [problem] = find_policy_problems(make_job(head={"nodePool": {"nodeSelector": {"pool": "x"}}}), {}, policy)
    assert problem.message.startswith("spec.head.nodePool.nodeSelector.pool must be one of cpu, h100, got x")


@pytest.mark.parametrize(
    ("limits", "spec", "path"),
    [
        ({"images": ["registry.io/a"]}, {"trainer": {"image": "other/trainer:1"}}, "spec.trainer.image"),
        ({"priorityClasses": ["low"]}, {"priorityClassName": "high"}, "spec.priorityClassName"),
    ],
)
def test_what_a_default_of_the_installation_may_allow_is_a_warning(limits, spec, path, tmp_path):
    policy = RLJobPolicy.model_validate({"metadata": {"name": "default"}, "spec": {"limits": limits}})
    [problem] = find_policy_problems(make_job(**spec), {}, policy)
    assert (problem.message.startswith(path), problem.is_certain) == (True, False)
    assert problem.message.endswith(", unless it is a default of the installation")
    assert list(find_policy_problems(make_job(), {}, policy)) == [], "the defaults themselves are allowed"


def test_validate_warns_of_an_image_that_may_be_a_default(tmp_path):
    job = write(tmp_path, JOB.replace("replicas: 2", "image: other/vllm:1"), "job.yaml")
    policy = POLICY.replace("limits: {", "limits: {images: [registry.io/a], ")
    arguments = ["validate", str(job), "--cluster", "--no-call", "--policy", str(write(tmp_path, policy))]
    done = CliRunner().invoke(app, arguments)
    assert f"warning: {job}:9: spec.rollout.image must begin with registry.io/a, got other/vllm:1" in done.output


def test_validate_takes_a_policy(tmp_path):
    arguments = ["validate", str(write(tmp_path, JOB, "job.yaml")), "--cluster", "--no-call"]
    done = CliRunner().invoke(app, [*arguments, "--policy", str(write(tmp_path, POLICY))])
    assert done.exit_code != 0
    assert "spec.rollout.replicas must be at most 1, got 2" in done.output
