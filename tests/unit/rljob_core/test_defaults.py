"""The administrator's file: what it may hold, and how it names what is wrong."""

import json

import pytest
import yaml

from rljob_api.errors import UserError
from rljob_api.manifest.services.reward import RewardModel
from rljob_core.backend import ObservedState, key_of, utc_now
from rljob_core.children import WORKLOAD_KINDS, build_children
from rljob_core.defaults import DEFAULTS, Defaults, load_defaults
from rljob_core.plan.job import plan_job
from rljob_core.plan.reward_model import plan_reward_model
from rljob_operator.__main__ import main, parse
from rljob_operator.operator import complete_defaults
from tests.paths import ROOT
from tests.support.job_simulation import FUNCTION, JobSimulation, make_agent_job, make_job

JUDGE = {"template": "x", "parser": {"regex": "(.)"}, "model": {"source": "/judge"}}
REWARDS = [{"name": "f", "function": FUNCTION}, {"name": "j", "judge": JUDGE}]
ROLES = ("head", "trainer", "rollout", "reward-f", "reward-j", "agent-user", "agent-calculator")


def write(tmp_path, text):
    path = tmp_path / "defaults.yaml"
    path.write_text(text)
    return path


def build_pods(defaults, **spec):
    """Return the Pod templates of a job with a function, a judge, a user and a tool, by role."""
    children = build_children(make_agent_job(**({"rewards": REWARDS} | spec)), "token", defaults)
    workloads = [child for child in children if child["kind"] in WORKLOAD_KINDS]
    return {child["metadata"]["name"].removeprefix("gsm8k-"): child["spec"]["template"] for child in workloads}


def test_chart_lists_exactly_the_built_in_defaults():
    values = yaml.safe_load((ROOT / "charts/rljob/values.yaml").read_text())["defaults"]
    assert values.pop("nodeSelector") == {"kubernetes.io/os": "linux"}, "of a cluster alone: `rljob run` has no nodes"
    assert Defaults.model_validate_json(json.dumps(values)) == DEFAULTS
    names = {field.alias for field in Defaults.model_fields.values()}
    assert {*values, "nodeSelector"} == names, "each value is explained there"


def test_file_replaces_what_it_names(tmp_path):
    digest = "registry.example.com/rljob/trainer@sha256:" + "0" * 64
    path = write(tmp_path, f"trainerImage: {digest}\nresources: {{head: {{requests: {{cpu: 2}}}}}}\n")
    defaults = load_defaults(path)
    assert (defaults.trainer_image, defaults.reward_image) == (digest, DEFAULTS.reward_image)
    assert defaults.resources.head.requests == {"cpu": "2"}
    assert defaults.resources.trainer == DEFAULTS.resources.trainer
    pods = build_pods(defaults)
    assert pods["head"]["spec"]["containers"][0]["image"] == digest
    assert pods["head"]["spec"]["containers"][0]["resources"] == {"requests": {"cpu": "2"}}


def test_python_of_a_role_chooses_its_image_unless_the_role_names_one():
    python = {"python": "3.12"}
    defaults = DEFAULTS.model_copy(update={"python_images": {"3.12": "r/py312"}})
    rewards = [{"name": name, "function": {"inline": "x"}} for name in ("plain", "new", "own", "none")]
    rewards[1] |= python
    rewards[2] |= python | {"image": "own"}
    rewards[3] |= {"python": "3.13"}
    pods = build_pods(defaults, rewards=rewards)
    images = [pods[f"reward-{reward['name']}"]["spec"]["containers"][0]["image"] for reward in rewards]
    assert images == [DEFAULTS.reward_image, "r/py312", "own", DEFAULTS.reward_image]


def test_empty_file_changes_nothing(tmp_path):
    assert load_defaults(write(tmp_path, "")) == DEFAULTS


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("trainerImage: a\ntrainerImag: b\n", "defaults.yaml:2: trainerImag is unknown; did you mean trainerImage?"),
        (
            "resources:\n  trainer:\n    requests: {memory: 1GB}\n",
            "defaults.yaml:3: resources.trainer.requests.memory must be a Kubernetes quantity",
        ),
        ("podSecurityContext:\n  runAsUsr: 1\n", "podSecurityContext.runAsUsr is unknown; did you mean runAsUser?"),
        ("tolerations: [{value: a}]\n", "tolerations[0].key must be set unless operator is Exists"),
        ("- a\n", "defaults.yaml:1: must be a mapping"),
        ("a: [\n", "defaults.yaml:2: the YAML cannot be read"),
        ("trainerImage: a\n---\nrewardImage: b\n", "defaults.yaml:3: must be a single document"),
    ],
)
def test_wrong_file_is_refused_with_field_and_line(tmp_path, capsys, text, problem):
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        load_defaults(path)
    assert problem in str(caught.value)
    assert main(["--defaults", str(path)]) == 78, "the operator does not start"
    assert problem in capsys.readouterr().err


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_defaults(tmp_path / "none.yaml")


def test_image_flags_take_precedence_over_the_file(tmp_path):
    path = write(tmp_path, "trainerImage: file\nrewardImage: file\n")
    defaults = parse(["--defaults", str(path), "--reward-image", "flag"]).defaults
    assert (defaults.trainer_image, defaults.reward_image) == ("file", "flag")


def test_operator_adds_its_own_namespace():
    assert complete_defaults(DEFAULTS, "ops").operator_namespace == "ops"
    assert complete_defaults(Defaults(operator_namespace="given"), "ops").operator_namespace == "given"
    assert complete_defaults(DEFAULTS, None).operator_namespace is None


ALL_PODS = Defaults.model_validate(
    {
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "mirror"}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "nodeSelector": {"pool": "rl", "zone": "a"},
        "priorityClassName": "batch",
        "runtimeClassName": "gvisor",
        "podSecurityContext": {"runAsNonRoot": True, "runAsUser": None, "seccompProfile": {"type": "RuntimeDefault"}},
        "labels": {"cost-center": "7", "rljob.dev/role": "mine"},
        "annotations": {"team": "nlp"},
    }
)


@pytest.mark.parametrize("role", ROLES)
def test_defaults_reach_all_pods(role):
    pod = build_pods(ALL_PODS)[role]
    assert pod["metadata"]["labels"] | {"cost-center": "7"} == pod["metadata"]["labels"]
    assert pod["metadata"]["labels"]["rljob.dev/role"] == role.partition("-")[0], "selectors need RLJob's own"
    assert pod["metadata"]["annotations"]["team"] == "nlp"
    spec = pod["spec"]
    containers = [*spec["containers"], *spec.get("initContainers", [])]
    assert {container["imagePullPolicy"] for container in containers} == {"Always"}
    assert spec["imagePullSecrets"] == [{"name": "mirror"}]
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert spec["nodeSelector"] == {"pool": "rl", "zone": "a"}
    assert (spec["priorityClassName"], spec["runtimeClassName"]) == ("batch", "gvisor")
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}, (
        "what the file leaves out is left to the platform"
    )


def test_fields_of_the_job_take_precedence():
    job = {"priorityClassName": "high", "runtimeClassName": "kata", "imagePullSecrets": [{"name": "own"}]}
    pool = {"nodeSelector": {"zone": "b"}, "tolerations": [{"key": "own", "operator": "Exists"}]}
    template = {"metadata": {"labels": {"cost-center": "8"}}, "spec": {"priorityClassName": "top"}}
    pods = build_pods(ALL_PODS, trainer={"nodePool": pool, "template": template}, **job)
    spec = pods["trainer"]["spec"]
    assert (spec["priorityClassName"], pods["head"]["spec"]["priorityClassName"]) == ("top", "high")
    assert spec["runtimeClassName"] == "kata"
    assert spec["imagePullSecrets"] == [{"name": "own"}, {"name": "mirror"}], "either may have the image"
    assert spec["nodeSelector"] == {"pool": "rl", "zone": "b"}
    assert [toleration["key"] for toleration in spec["tolerations"]] == ["own", "gpu"]
    assert pods["trainer"]["metadata"]["labels"]["cost-center"] == "8"


def test_reward_model_has_the_fields_of_all_pods_and_its_server_does_not_read_them():
    spec = {"function": FUNCTION, "serviceAccountName": "scorer", "imagePullSecrets": [{"name": "own"}]}
    model = RewardModel.model_validate({"metadata": {"name": "m", "uid": "u"}, "spec": spec})
    children = plan_reward_model(model, ObservedState({}), utc_now(), defaults=ALL_PODS).children
    (pod,) = (child["spec"]["template"]["spec"] for child in children if child["kind"] == "Deployment")
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("scorer", False)
    assert pod["imagePullSecrets"] == [{"name": "own"}, {"name": "mirror"}]
    assert pod["priorityClassName"] == "batch"
    (config,) = (child["data"]["service.yaml"] for child in children if child["kind"] == "ConfigMap")
    assert "scorer" not in config, "the server would refuse fields that it does not know"


@pytest.mark.parametrize("role", ROLES)
def test_every_container_requests_something(role):
    spec = build_pods(DEFAULTS)[role]["spec"]
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        requested = container["resources"]["requests"].keys()
        assert requested == {"cpu", "memory", "ephemeral-storage"}, "a BestEffort Pod is evicted first"


def test_job_in_a_queue_of_kueue_requests_no_disk_by_default():
    """Kueue admits no Pod with a resource that its queue does not cover."""
    own = {"resources": {"requests": {"ephemeral-storage": "9Gi"}}}
    pods = build_pods(DEFAULTS, scheduling={"gang": "kueue", "queue": "q"}, trainer=own)
    found = {role: pod["spec"]["containers"][0]["resources"]["requests"] for role, pod in pods.items()}
    assert found.pop("trainer")["ephemeral-storage"] == "9Gi"
    assert found
    assert all(requests.keys() == {"cpu", "memory"} for requests in found.values())


def test_trainer_that_runs_rollouts_requests_the_sum():
    defaults = Defaults.model_validate(
        {
            "resources": {
                "trainer": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "8Gi", "cpu": "4"}},
                "rollout": {"requests": {"memory": "512Mi", "ephemeral-storage": "1Gi"}, "limits": {"memory": "4Gi"}},
            }
        }
    )
    job = {"trainer": {"gpusPerReplica": 4}, "rollout": {"placement": "trainer", "gpusPerReplica": 2}}
    (container,) = build_pods(defaults, **job)["trainer"]["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "0.5", "memory": "2Gi", "ephemeral-storage": "2Gi"},
        "limits": {"nvidia.com/gpu": "4", "memory": "16Gi"},
    }, "two rollouts; without a limit of theirs, the Pod has none"


BOTH = Defaults.model_validate(
    {"resources": {"trainer": {"requests": {"cpu": "1", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}}}
)


@pytest.mark.parametrize(
    ("trainer", "resources"),
    [
        ({}, {"requests": {"cpu": "1", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}),
        (
            {"resources": {"limits": {"memory": "4Gi"}}},
            {"requests": {"cpu": "1"}, "limits": {"memory": "4Gi"}},
        ),
        (
            {"resources": {"requests": {"memory": "32Gi"}}},
            {"requests": {"cpu": "1", "memory": "32Gi"}},
        ),
        (
            {"template": {"spec": {"containers": [{"name": "trainer", "resources": {"limits": {"cpu": "500m"}}}]}}},
            {"requests": {"memory": "8Gi"}, "limits": {"memory": "8Gi", "cpu": "500m"}},
        ),
        (
            {"template": {"spec": {"resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}}}},
            {},
        ),
        (
            {"gpusPerReplica": 2},
            {"requests": {"cpu": "1", "memory": "8Gi"}, "limits": {"nvidia.com/gpu": "2", "memory": "8Gi"}},
        ),
    ],
)  # fmt: skip
def test_what_the_job_says_about_a_resource_replaces_both_defaults(trainer, resources):
    (container,) = build_pods(BOTH, trainer=trainer)["trainer"]["spec"]["containers"]
    assert container["resources"] == resources, "a request above the limit would be refused"


def test_container_of_a_template_gets_no_default_requests():
    own = {"name": "own", "image": "own:1"}
    spec = build_pods(DEFAULTS, head={"template": {"spec": {"containers": [own]}}})["head"]["spec"]
    found = next(container for container in spec["containers"] if container["name"] == "own")
    assert "resources" not in found


@pytest.mark.parametrize(
    ("limits", "size"), [({}, DEFAULTS.reward_scratch_size), ({"ephemeral-storage": "50Gi"}, "50Gi")]
)
def test_emptydirs_of_a_reward_are_limited(limits, size):
    rewards = [{"name": "f", "function": FUNCTION, "resources": {"limits": limits}}]
    volumes = build_pods(DEFAULTS, rewards=rewards)["reward-f"]["spec"]["volumes"]
    sizes = {volume["name"]: volume["emptyDir"].get("sizeLimit") for volume in volumes if "emptyDir" in volume}
    assert sizes == {"scratch": size, "tmp": size}


def test_changed_defaults_replace_no_pod_of_an_existing_job():
    simulation = JobSimulation(make_job(rewards=REWARDS))
    simulation.reconcile()
    simulation.reconcile()
    observed = ObservedState(simulation.children)
    made = plan_job(simulation.job, observed, simulation.now, defaults=ALL_PODS, new_token=lambda: "t")
    workloads = {key_of(child): child["spec"]["template"] for child in made.children if child["kind"] in WORKLOAD_KINDS}
    assert workloads == {key: simulation.children[key]["spec"]["template"] for key in workloads}
    assert (len(workloads), made.delete) == (5, ())
