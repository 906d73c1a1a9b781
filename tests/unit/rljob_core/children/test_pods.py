"""What the Pods of all roles share: volumes, and probes."""

import pytest

from rljob_core.children import build_children
from rljob_core.defaults import DEFAULTS
from tests.paths import ROOT
from tests.support.job_simulation import make_job, make_program_job


def test_claim_with_model_and_checkpoints_is_one_writable_volume():
    job = make_job(
        model={"source": "pvc://all/model"},
        data={"train": {"source": "pvc://all/train.jsonl"}, "eval": {"source": "pvc://other/eval.jsonl"}},
        checkpoint={"persistentVolumeClaim": {"claimName": "all"}},
    )
    head = next(child for child in build_children(job, "token", DEFAULTS) if child["kind"] == "Job")
    spec = head["spec"]["template"]["spec"]
    claims = {v["name"]: v["persistentVolumeClaim"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
    assert sorted(claims.values(), key=str) == [{"claimName": "all"}, {"claimName": "other", "readOnly": True}]
    mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts["/var/lib/rljob"] == {"name": "run", "mountPath": "/var/lib/rljob", "subPath": "gsm8k"}
    assert mounts["/mnt/pvc/all"] == {"name": "run", "mountPath": "/mnt/pvc/all", "readOnly": True}


@pytest.mark.parametrize(
    ("checkpoint", "head", "trainer"),
    [
        ({}, "emptyDir", None),
        ({"storage": "s3://bucket/runs"}, "emptyDir", None),
        ({"persistentVolumeClaim": {"claimName": "runs"}}, "persistentVolumeClaim", "persistentVolumeClaim"),
        ({"persistentVolumeClaim": {"claimName": "runs", "mountedBy": "head"}}, "persistentVolumeClaim", None),
    ],
)
def test_trainers_mount_the_run_folder_only_if_it_is_the_heads(checkpoint, head, trainer):
    """A folder in each Pod would be another run's for the ranks, and grow without limit."""
    children = build_children(make_job(checkpoint=checkpoint), "token", DEFAULTS)
    for kind, expected in (("Job", head), ("StatefulSet", trainer)):
        spec = next(child for child in children if child["kind"] == kind)["spec"]["template"]["spec"]
        sources = [set(volume) - {"name"} for volume in spec["volumes"] if volume["name"] == "run"]
        assert sources == ([{expected}] if expected else [])
        env = {entry["name"] for entry in spec["containers"][0]["env"]}
        assert ("RLJOB_RUN_DIR" in env) == bool(expected)


@pytest.mark.parametrize(
    ("checkpoint", "protected"),
    [({}, True), ({"persistentVolumeClaim": {"claimName": "c"}}, False), ({"storage": "s3://bucket/runs"}, False)],
)
def test_eviction_is_refused_only_where_it_would_lose_the_run(checkpoint, protected):
    children = build_children(make_job(checkpoint=checkpoint), "token", DEFAULTS)
    budgets = {child["metadata"]["name"]: child["spec"] for child in children if child["kind"] == "PodDisruptionBudget"}
    assert ("gsm8k-head" in budgets) == protected
    assert "gsm8k-trainer" not in budgets, "the head has its checkpoints"


def find_budgets(**spec):
    children = build_children(make_job(**spec), "token", DEFAULTS)
    return {child["metadata"]["name"] for child in children if child["kind"] == "PodDisruptionBudget"}


def test_serving_role_of_one_pod_has_no_budget():
    """One that allows the eviction of one Pod protects no single one."""
    reward = {"name": "correct", "function": {"inline": "x"}}
    assert find_budgets() == {"gsm8k-head"}
    assert find_budgets(rollout={"replicas": 2}) == {"gsm8k-head", "gsm8k-rollout"}
    assert find_budgets(rewards=[reward | {"replicas": 2}]) == {"gsm8k-head", "gsm8k-reward-correct"}


@pytest.mark.parametrize(("rollout", "has_service"), [({}, False), ({"placement": "trainer"}, True)])
def test_trainers_have_a_service_only_if_someone_resolves_its_name(rollout, has_service):
    """Ranks, and rollouts that fetch weights, get addresses; the driver finds engines in trainers by the name."""
    children = build_children(make_job(rollout=rollout), "token", DEFAULTS)
    names = {child["metadata"]["name"] for child in children if child["kind"] == "Service"}
    assert ("gsm8k-trainer" in names) == has_service


HUB = {"endpoint": "http://hub.example:8080", "tokenSecretRef": {"name": "hub", "key": "HF_TOKEN"}}
JUDGE = {"template": "x", "parser": {"regex": "(.)"}, "model": {"source": "hf://org/judge"}}


def read_hub_env(job, *prefixes):
    """Return, by workload and container, the variables of the Hub, or with other prefixes. A name may occur once."""
    prefixes = prefixes or ("HF_",)
    found = {}
    for child in build_children(job, "token", DEFAULTS):
        if child["kind"] in ("Job", "StatefulSet", "Deployment"):
            spec = child["spec"]["template"]["spec"]
            for container in [*spec["containers"], *spec.get("initContainers", [])]:
                env = [entry for entry in container.get("env", []) if entry["name"].startswith(prefixes)]
                names = [entry["name"] for entry in env]
                assert len(names) == len(set(names)), "the API server rejects two entries of the same name"
                key = f"{child['metadata']['name']}/{container['name']}"
                found[key] = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in env}
    return found


def test_hub_reaches_all_that_load_models_and_no_reward_function():
    rewards = [{"name": "f", "function": {"inline": "x"}}, {"name": "j", "judge": JUDGE}]
    job = make_job(hub=HUB, rewards=rewards)
    expected = {"HF_ENDPOINT": HUB["endpoint"], "HF_TOKEN": {"secretKeyRef": HUB["tokenSecretRef"]}}
    found = read_hub_env(job)
    assert {name for name, env in found.items() if env == expected} == {
        "gsm8k-head/head", "gsm8k-trainer/trainer", "gsm8k-rollout/rollout", "gsm8k-reward-j/vllm",
    }  # fmt: skip
    assert {name for name, env in found.items() if not env} == {"gsm8k-reward-f/reward", "gsm8k-reward-j/reward"}
    policies = {
        child["metadata"]["name"]: [port["port"] for rule in child["spec"]["egress"] for port in rule.get("ports", [])]
        for child in build_children(job, "token", DEFAULTS)
        if child["kind"] == "NetworkPolicy"
    }
    assert {name for name, ports in policies.items() if 8080 in ports} == {
        "gsm8k-head", "gsm8k-rollout", "gsm8k-reward-j",
    }  # fmt: skip


STORAGE = {"endpoint": "http://storage.example:9000", "region": "eu-central-1", "secretRef": {"name": "storage"}}


def test_object_storage_reaches_all_that_load_models_and_no_reward_function():
    rewards = [{"name": "f", "function": {"inline": "x"}}, {"name": "j", "judge": JUDGE}]
    job = make_job(objectStorage=STORAGE, rewards=rewards)
    found = read_hub_env(job, "AWS_", "AZURE_")
    having = {name for name, env in found.items() if env}
    assert having == {"gsm8k-head/head", "gsm8k-trainer/trainer", "gsm8k-rollout/rollout", "gsm8k-reward-j/vllm"}
    for name in having:
        env = found[name]
        assert (env["AWS_ENDPOINT_URL_S3"], env["AWS_REGION"]) == (STORAGE["endpoint"], STORAGE["region"])
        key = {"name": "storage", "key": "AWS_SECRET_ACCESS_KEY", "optional": True}
        assert env["AWS_SECRET_ACCESS_KEY"] == {"secretKeyRef": key}
    assert not any(read_hub_env(make_job(rewards=rewards), "AWS_", "AZURE_").values()), "without the field, no variable"


@pytest.mark.parametrize(("source", "seconds"), [("pvc://c/m", 600), ("hf://org/m", 4200), ("s3://b/m", 4200)])
def test_rollout_has_time_to_download_its_model(source, seconds):
    children = build_children(make_job(model={"source": source}), "token", DEFAULTS)
    (rollout,) = (c for c in children if c["kind"] == "Deployment" and c["metadata"]["name"] == "gsm8k-rollout")
    probe = rollout["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == seconds


def test_startup_timeout_of_a_rollout_replaces_the_default():
    job = make_job(model={"source": "hf://org/m"}, rollout={"startupTimeoutSeconds": 900})
    children = build_children(job, "token", DEFAULTS)
    (rollout,) = (c for c in children if c["kind"] == "Deployment" and c["metadata"]["name"] == "gsm8k-rollout")
    probe = rollout["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 900


def test_env_of_a_role_overrides_the_hub():
    found = read_hub_env(make_job(hub=HUB, rollout={"env": {"HF_ENDPOINT": "http://near"}}))
    assert found["gsm8k-rollout/rollout"]["HF_ENDPOINT"] == "http://near"
    assert found["gsm8k-head/head"]["HF_ENDPOINT"] == HUB["endpoint"]


RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def build_head_containers(**spec):
    job = make_job(head={"template": {"spec": spec}})
    head = next(child for child in build_children(job, "token", DEFAULTS) if child["kind"] == "Job")
    spec = head["spec"]["template"]["spec"]
    return {container["name"]: container for container in spec["containers"] + spec.get("initContainers", [])}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, RESTRICTED),
        ({"securityContext": None}, RESTRICTED),
        ({"securityContext": {"runAsUser": 2000}}, RESTRICTED | {"runAsUser": 2000}),
        ({"securityContext": {"allowPrivilegeEscalation": True}}, RESTRICTED | {"allowPrivilegeEscalation": True}),
        ({"securityContext": {"privileged": True}}, {"privileged": True}),
    ],
)
@pytest.mark.parametrize("field", ["containers", "initContainers"])
def test_containers_of_a_template_are_unprivileged_unless_they_say_otherwise(field, own, expected):
    containers = build_head_containers(**{field: [{"name": "added", "image": "i", **own}]})
    assert containers["added"]["securityContext"] == expected
    assert containers["head"]["securityContext"] == RESTRICTED | {"readOnlyRootFilesystem": True}


def test_null_does_not_remove_the_restrictions_of_a_container():
    own = {"name": "head", "securityContext": None}
    assert build_head_containers(containers=[own])["head"]["securityContext"] == RESTRICTED


def test_gpus_of_each_role_are_requested_by_the_name_of_its_pool():
    trainer = {"gpusPerReplica": 8, "nodePool": {"gpuResource": "amd.com/gpu"}}
    slices = {"nodePool": {"gpuResource": "nvidia.com/mig-3g.40gb"}}
    judge = {"name": "j", "judge": JUDGE | {"model": {"source": "hf://org/judge", "gpusPerReplica": 1}}, **slices}
    rollout = {"gpusPerReplica": 2, "resources": {"limits": {"rdma/hca_shared_devices_a": 1}}}
    limits = {}
    for child in build_children(make_job(trainer=trainer, rollout=rollout, rewards=[judge]), "token", DEFAULTS):
        spec = child["spec"]["template"]["spec"] if "template" in child.get("spec", {}) else {}
        for container in [*spec.get("containers", []), *spec.get("initContainers", [])]:
            limits[container["name"]] = container["resources"].get("limits")
    assert limits == {
        "head": None,
        "trainer": {"amd.com/gpu": "8"},
        "rollout": {"nvidia.com/gpu": "2", "rdma/hca_shared_devices_a": "1"},
        "reward": None,
        "vllm": {"nvidia.com/mig-3g.40gb": "1"},
    }


TAINTS = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"]


def read_tolerations(**spec):
    """Return, by workload, the seconds for which its Pods tolerate each taint of a lost node."""
    workloads = (c for c in build_children(make_job(**spec), "token", DEFAULTS) if "template" in c.get("spec", {}))
    found = {w["metadata"]["name"]: w["spec"]["template"]["spec"].get("tolerations") or [] for w in workloads}
    return {name: {t.get("key"): t.get("tolerationSeconds") for t in all_} for name, all_ in found.items() if all_}


def test_job_that_deletes_by_force_waits_less_for_a_node_of_its_training_group():
    assert read_tolerations() == {}
    soon = dict.fromkeys(TAINTS, 60)
    assert read_tolerations(scheduling={"forceDeleteAfterSeconds": 30}) == {"gsm8k-head": soon, "gsm8k-trainer": soon}


def test_users_own_tolerations_of_a_lost_node_stay():
    scheduling = {"forceDeleteAfterSeconds": 30}
    own = {"key": TAINTS[0], "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 900}
    found = read_tolerations(scheduling=scheduling, trainer={"nodePool": {"tolerations": [own]}})
    assert found["gsm8k-trainer"] == {TAINTS[0]: 900, TAINTS[1]: 60}
    found = read_tolerations(scheduling=scheduling, trainer={"nodePool": {"tolerations": [{"operator": "Exists"}]}})
    assert found["gsm8k-trainer"] == {None: None}
    in_template = {"template": {"spec": {"tolerations": [own | {"tolerationSeconds": 5}]}}}
    found = read_tolerations(scheduling=scheduling, trainer=in_template)
    assert found["gsm8k-trainer"] == {TAINTS[0]: 5, TAINTS[1]: 60}, "not both: Kubernetes takes the first"


def test_the_head_alone_has_the_keys_of_the_models_that_a_program_calls_by_name():
    reference = {"name": "keys", "key": "OPENAI_API_KEY"}
    models = [{"name": "open", "url": "http://a"}, {"name": "paid", "url": "https://b", "apiKeySecretRef": reference}]
    children = build_children(make_program_job(models=models), "token", DEFAULTS)
    pods = {child["metadata"]["name"]: str(child) for child in children if "template" in child.get("spec", {})}
    assert [name for name, text in pods.items() if "OPENAI_API_KEY" in text] == ["gsm8k-head"]
    [head] = [child for child in children if child["metadata"]["name"] == "gsm8k-head" and child["kind"] == "Job"]
    env = {each["name"]: each for each in head["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["RLJOB_MODEL_API_KEY_1"]["valueFrom"] == {"secretKeyRef": reference}


@pytest.mark.parametrize("make", [make_job, make_program_job])
def test_each_server_is_killed_when_it_answers_nothing_and_in_little_time(make):
    """A port is no sign of life: the kernel accepts connections of a stopped process."""
    found = {}
    rewards = [{"name": "j", "judge": JUDGE}] if make is make_job else []
    for child in build_children(make(rewards=rewards), "token", DEFAULTS):
        if child["kind"] in ("Job", "StatefulSet", "Deployment"):
            spec = child["spec"]["template"]["spec"]
            for container in [*spec["containers"], *spec.get("initContainers", [])]:
                found[container["name"]] = container.get("livenessProbe")
    assert found.pop("trainer") is None, "it is a node of Ray, which watches its nodes"
    for name, probe in found.items():
        assert probe["terminationGracePeriodSeconds"] == 10, name
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 60, "a busy program is not killed"
        assert "tcpSocket" not in probe, name
        assert name == "vllm" or probe["httpGet"]["path"] == "/rljob/live"


def test_head_and_trainers_know_a_grace_period_of_their_template():
    template = {"spec": {"terminationGracePeriodSeconds": 300}}
    children = build_children(make_job(head={"template": template}), "token", DEFAULTS)
    found = {}
    for child in children:
        if child["kind"] in ("Job", "StatefulSet"):
            pod = child["spec"]["template"]["spec"]
            env = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
            found[child["kind"]] = (pod["terminationGracePeriodSeconds"], env.get("RLJOB_GRACE_SECONDS"))
    assert found == {"Job": (300, "300"), "StatefulSet": (60, None)}


def test_children_and_pods_have_the_recommended_labels_and_selectors_do_not():
    defaults = DEFAULTS.model_copy(update={"labels": {"app.kubernetes.io/part-of": "our-platform"}})
    names = ("name", "instance", "component", "part-of", "managed-by")
    for child in build_children(make_job(), "token", defaults):
        labels = child["metadata"]["labels"]
        role = labels.get("rljob.dev/role", "shared")
        own = [labels[f"app.kubernetes.io/{name}"] for name in names]
        assert own == ["rljob", "gsm8k", role, "rljob", "rljob-operator"], child["kind"]
        if template := child.get("spec", {}).get("template"):
            found = [template["metadata"]["labels"][f"app.kubernetes.io/{name}"] for name in names]
            assert found == ["rljob", "gsm8k", role, "our-platform", "rljob-operator"], "an administrator's own stay"
        for selector in (child.get("spec", {}).get("selector", {}), child.get("spec", {}).get("podSelector", {})):
            assert "app.kubernetes.io" not in str(selector), "selectors stay as they are"


def test_log_format_reaches_every_program_and_text_needs_no_variable():
    for log_format, expected in (("text", set()), ("json", {"json"})):
        defaults = DEFAULTS.model_copy(update={"log_format": log_format})
        for child in build_children(make_program_job(), "token", defaults):
            if template := child.get("spec", {}).get("template"):
                [container] = template["spec"]["containers"]
                env = {entry["name"]: entry.get("value") for entry in container["env"]}
                found = {env[name] for name in ("RLJOB_LOG_FORMAT",) if name in env}
                assert found == expected, child["metadata"]


def build_containers(defaults=DEFAULTS, **spec):
    """[container, paths that it may write to] of all Pods of a job with a judge's sidecar."""
    judge = {"template": "x", "parser": {"regex": "(.)"}, "model": {"source": "/j"}}
    rewards = [{"name": "f", "function": {"inline": "x"}}, {"name": "j", "judge": judge}]
    for child in build_children(make_job(rewards=rewards, **spec), "token", defaults):
        if template := child.get("spec", {}).get("template"):
            pod = template["spec"]
            empty = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
            for container in [*pod["containers"], *pod.get("initContainers", [])]:
                mounts = [mount for mount in container["volumeMounts"] if mount["name"] in empty]
                yield container, {mount["mountPath"] for mount in mounts}


def test_root_file_systems_are_read_only_and_homes_writable():
    found = list(build_containers())
    assert [container["name"] for container, _ in found] == ["head", "trainer", "rollout", "reward", "reward", "vllm"]
    for container, writable in found:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert "/tmp" in writable, "HOME of the images, and what tempfile takes"
    tmp = [mount["name"] for c, _ in found[-2:] for mount in c["volumeMounts"] if mount["mountPath"] == "/tmp"]
    assert len(set(tmp)) == 2, "a function does not write to the caches of its judge"
    assert " HOME=/tmp " in (ROOT / "trainer_image" / "Dockerfile").read_text()


def test_root_file_system_is_writable_where_the_defaults_or_a_template_say_so():
    found = {
        c["name"]: c for c, _ in build_containers(DEFAULTS.model_copy(update={"read_only_root_filesystem": False}))
    }
    writable = {name for name, c in found.items() if not c["securityContext"].get("readOnlyRootFilesystem")}
    assert writable == {"head", "trainer", "rollout", "vllm"}, "a reward's code is not trusted"
    assert not any(mount["mountPath"] == "/tmp" for mount in found["head"]["volumeMounts"])
    own = {"spec": {"containers": [{"name": "head", "securityContext": {"readOnlyRootFilesystem": False}}]}}
    (head, _), *_ = build_containers(head={"template": own})
    assert head["securityContext"]["readOnlyRootFilesystem"] is False
