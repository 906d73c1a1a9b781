"""Plans of jobs: golden files for children and status, and what restarts which Pods."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.wire.contract import LABEL_JOB, LABEL_ROLE
from rljob_api.wire.driver_status import DriverStatus
from rljob_core.backend import ChildKey, ObservedState, key_of
from rljob_core.children import POD_KINDS, WORKLOAD_KINDS
from rljob_core.children.common import ANNOTATION_CONFIG_HASH, to_yaml
from rljob_core.children.config import read_token
from rljob_core.defaults import image_tag
from rljob_core.plan.job import plan_job, render_children
from rljob_core.plan.start_model import read_start_job
from tests.paths import ROOT
from tests.support import fast_yaml
from tests.support.job_simulation import JobSimulation, make_job

DATA = ROOT / "tests" / "data" / "plan"
CASES = sorted(folder.name for folder in DATA.iterdir())
IMAGES = ("rljob/trainer:", "rljob/reward:", "rljob/reward-py312:")
NOW = datetime(2026, 1, 2, 0, 30, tzinfo=UTC)


def load(case):
    return RLJob.model_validate(fast_yaml.load((DATA / case / "job.yaml").read_text()))


def load_observed(case):
    file = DATA / case / "observed.yaml"
    documents = list(fast_yaml.load_all(file.read_text())) if file.exists() else []
    models = [RewardModel.model_validate(document) for document in documents if document["kind"] == "RewardModel"]
    drivers = [document for document in documents if document["kind"] == "DriverStatus"]
    others = ("RewardModel", "DriverStatus", "Pod", "RLJob")
    children = {key_of(child): child for child in documents if child["kind"] not in others}
    return ObservedState(
        children=children,
        pods=tuple(document for document in documents if document["kind"] == "Pod"),
        driver=DriverStatus.model_validate(drivers[0]["status"]) if drivers else None,
        reward_models={model.metadata.name: model for model in models},
        start_job=read_start_job(next((each for each in documents if each["kind"] == "RLJob"), None)),
    )


def make_plan(job, observed=None):
    return plan_job(job, observed or ObservedState(), NOW, new_token=lambda: "a-token")


def children_of(job):
    return {key_of(child): child for child in make_plan(job).children}


def changed(job, path, value, *others):
    """The job with changed fields: pairs of a path in spec, and a value."""
    manifest = job.model_dump(mode="json", by_alias=True)
    for where, new in ((path, value), *others):
        place = manifest["spec"]
        *parents, last = where.split(".")
        for name in parents:
            place = place[int(name)] if name.isdigit() else place[name]
        place[last] = new
    return RLJob.model_validate(manifest)


def hashes(job):
    return {
        key.name: child["spec"]["template"]["metadata"]["annotations"][ANNOTATION_CONFIG_HASH]
        for key, child in children_of(job).items()
        if key.kind in WORKLOAD_KINDS
    }


@pytest.mark.parametrize("case", CASES)
def test_plan_matches_the_golden_files(case, golden):
    made = make_plan(load(case), load_observed(case))
    text = {
        "delete": [f"{kind} {name}" for kind, name in made.delete],
        "events": [f"{event.type} {event.reason}: {event.message}" for event in made.events],
        "requeueAfterSeconds": made.requeue_after_seconds,
        "deleteJob": made.delete_job,
        "status": made.status.to_manifest(exclude={"defaults": True}),
    }
    golden(DATA / case / "children.yaml", without_version("---\n".join(to_yaml(child) for child in made.children)))
    golden(DATA / case / "plan.yaml", without_version(to_yaml(text)))


def without_version(text):
    """Return a text that a release leaves as it is."""
    for before in ("app.kubernetes.io/version: ", *IMAGES):
        text = text.replace(f"{before}{image_tag()}", f"{before}VERSION")
    return text


def test_job_file_reads_back_as_the_same_spec_with_explicit_nulls():
    job = load("full")
    config = next(c for c in children_of(job).values() if c["metadata"]["name"] == "full-config")
    read = RLJob.model_validate(fast_yaml.load(config["data"]["job.yaml"]))
    assert read.spec == job.spec
    assert read.spec.algorithm.optimizer.max_grad_norm is None, "null means no clipping, not the default"


def test_children_ignore_metadata_that_the_api_server_writes():
    job = load("smallest")
    later = job.model_copy(deep=True)
    later.metadata.generation, later.status.phase = 9, "Running"
    setattr(later.metadata, "resourceVersion", "123")  # noqa: B010
    assert children_of(job) == children_of(later)


@pytest.mark.parametrize("case", ["smallest", "full", "shared", "agent", "program", "environment"])
def test_every_child_has_labels_owner_and_a_matching_selector(case):
    job = load(case)
    for key, child in children_of(job).items():
        assert child["metadata"]["labels"][LABEL_JOB] == job.metadata.name, key
        assert child["metadata"]["ownerReferences"][0]["uid"] == job.metadata.uid, key
        assert len(child["metadata"]["name"]) <= 63, key
        if key.kind in WORKLOAD_KINDS:
            pod = child["spec"]["template"]["metadata"]["labels"]
            selector = child["spec"].get("selector", {}).get("matchLabels", {LABEL_ROLE: "head"})
            assert selector.items() <= pod.items(), key
            assert child["spec"]["template"]["spec"]["automountServiceAccountToken"] is False, key


@pytest.mark.parametrize(
    ("path", "value", "rolls"),
    [
        ("schedule.steps", 900, set()),
        ("schedule.maxStepsWithoutSignal", 0, set()),
        ("rollout.replicas", 9, set()),
        ("rewards.0.replicas", 9, set()),
        ("suspend", False, set()),
        ("activeDeadlineSeconds", 5, set()),
        ("progressDeadlineSeconds", 5, set()),
        ("hangDetection", {"maxSeconds": 90}, set()),
        ("outageSeconds", 5, set()),
        ("checkpoint.everySteps", 5, set()),
        ("checkpoint.keep", 5, set()),
        ("checkpoint.exportPolicy", "never", {"full-head"}),
        ("tracking.trajectoriesSize", "2Gi", set()),
        ("rollout.backoffLimit", 99, set()),
        ("head.backoffLimit", 99, set()),
        ("trainer.backoffWindowSeconds", 9000, set()),
        ("head.backoffWindowSeconds", 9000, set()),
        ("rollout.resources.limits", {"cpu": "1"}, set()),
        ("rewards.0.function.inline", "def f(): ...", {"full-reward-correct"}),
        ("rewards.0.slots", 3, {"full-reward-correct", "full-head"}),
        ("rewards.0.weight", 0.5, {"full-head"}),
        ("rollout.sampling.temperature", 0.7, set()),
        ("rollout.sampling.maxTokens", 77, {"full-head"}),
        ("rollout.maxModelLen", 4096, {"full-rollout", "full-head"}),
        ("algorithm.loss.clipHigh", 0.3, {"full-head"}),
        ("trainer.headDtype", "float32", {"full-head", "full-rollout"}),
        ("head.image", "other", {"full-head"}),
        ("model.revision", "v2", {"full-head", "full-trainer", "full-rollout"}),
    ],
)
def test_changed_field_restarts_only_the_roles_that_read_it(path, value, rolls):
    before, after = hashes(load("full")), hashes(changed(load("full"), path, value))
    assert {name for name in before if before[name] != after[name]} == rolls


@pytest.mark.parametrize(
    ("path", "value", "rolls"),
    [
        ("rollout.maxModelLen", 4096, {"gsm8k-head", "gsm8k-trainer"}),
        ("rollout.extraArgs", [], {"gsm8k-head", "gsm8k-trainer"}),
        ("rollout.startupTimeoutSeconds", 60, {"gsm8k-head", "gsm8k-trainer"}),
        ("rollout.gpuMemoryUtilization", 0.5, {"gsm8k-head", "gsm8k-trainer"}),
        ("trainer.dtype", "float16", {"gsm8k-head", "gsm8k-trainer"}),
        ("rollout.sampling.temperature", 0.7, set()),
        ("rollout.backoffLimit", 99, set()),
        ("algorithm.loss.clipHigh", 0.3, {"gsm8k-head"}),
    ],
)
def test_trainer_that_runs_the_rollouts_restarts_for_what_they_read(path, value, rolls):
    before, after = hashes(load("shared")), hashes(changed(load("shared"), path, value))
    assert {name for name in before if before[name] != after[name]} == rolls


def test_rollouts_of_a_suspended_job_may_move_to_the_trainer():
    """Their Service, policy and budget are deleted with them."""
    stored = children_of(changed(load("smallest"), "rollout.replicas", 2))
    of_rollout = {key for key in stored if key.name == "gsm8k-rollout"}
    assert {key.kind for key in of_rollout} == {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"}
    job = changed(load("smallest"), "suspend", True)
    moved = make_plan(changed(job, "rollout.placement", "trainer"), ObservedState(children=stored))
    workloads = {key for key in stored if key.kind in WORKLOAD_KINDS}
    assert set(moved.delete) == of_rollout | workloads
    assert [role.name for role in moved.status.roles] == ["head", "trainer", "reward-correct"]


def test_job_that_is_created_suspended_has_its_token_alone():
    job = changed(load("smallest"), "suspend", True)
    first = make_plan(job)
    assert [key_of(child) for child in first.children] == [("Secret", "gsm8k-token")]
    stored = {key_of(child): child for child in first.children}
    again = plan_job(job, ObservedState(children=stored), NOW, new_token=lambda: "another")
    assert again.children == first.children, "Pods and driver share this token when it is resumed"


def test_suspended_job_keeps_what_has_no_pods():
    """Its Pods save a checkpoint while they end."""
    stored = children_of(load("smallest"))
    made = make_plan(changed(load("smallest"), "suspend", True), ObservedState(children=stored))
    assert {key_of(child) for child in made.children} == {key for key in stored if key.kind not in WORKLOAD_KINDS}


@pytest.mark.parametrize(
    ("path", "value", "rolls"),
    [
        ("agent.user.replicas", 9, set()),
        ("agent.user.backoffLimit", 9, set()),
        ("agent.tools.1.env", {"A": "b"}, set()),
        ("agent.user.function.inline", "def respond(): ...", {"sums-agent-user"}),
        ("agent.tools.1.function.network", False, {"sums-agent-search"}),
        ("agent.tools.0.queueLength", 7, {"sums-agent-calculator"}),
        ("agent.tools.0.slots", 3, {"sums-agent-calculator", "sums-head"}),
        ("agent.user.retries", 0, {"sums-head"}),
        ("agent.tools.0.onError", "message", {"sums-head"}),
        ("agent.maxUserTurns", 2, {"sums-head"}),
        ("agent.maxAssistantTurns", 9, {"sums-head"}),
        ("agent.maxAssistantTurns", 8, set()),  # as null
    ],
)
def test_changed_field_of_an_agent_restarts_only_the_roles_that_read_it(path, value, rolls):
    before, after = hashes(load("agent")), hashes(changed(load("agent"), path, value))
    assert {name for name in before if before[name] != after[name]} == rolls


@pytest.mark.parametrize(
    ("case", "path", "value", "rolls"),
    [
        ("program", "agent.runner.replicas", 9, set()),
        ("program", "agent.runner.resources.limits", {"memory": "1Gi"}, set()),
        ("program", "agent.runner.command", ["other"], {"coder-agent-runner"}),
        ("program", "agent.runner.workingDir", "/other", {"coder-agent-runner"}),
        ("program", "agent.runner.network", True, {"coder-agent-runner"}),
        ("program", "agent.runner.slots", 3, {"coder-agent-runner", "coder-head"}),
        ("program", "agent.runner.retries", 0, {"coder-head"}),
        ("program", "agent.rewardWeight", 1, {"coder-head"}),
        ("environment", "agent.environment.args", {"lines": 4}, {"words-agent-runner"}),
        ("environment", "agent.environment.framework", "gymnasium", {"words-agent-runner"}),
        ("environment", "agent.runner", {"retries": 0}, {"words-head"}),
    ],
)
def test_changed_field_of_a_runner_restarts_only_the_roles_that_read_it(case, path, value, rolls):
    before, after = hashes(load(case)), hashes(changed(load(case), path, value))
    assert {name for name in before if before[name] != after[name]} == rolls


def test_framework_of_an_environment_of_the_users_source_replaces_its_pods():
    """Its source stays; only the arguments of the server differ."""
    job = changed(load("environment"), "agent.environment.id", None, ("agent.runner", {"function": {"inline": "x"}}))
    before, after = hashes(job), hashes(changed(job, "agent.environment.framework", "trl"))
    assert {name for name in before if before[name] != after[name]} == {"words-agent-runner"}


def test_removed_tool_loses_only_its_own_children():
    full = load("agent")
    tools = [full.spec.agent.tools[0].model_dump(mode="json", by_alias=True)]
    made = make_plan(changed(full, "agent.tools", tools), ObservedState(children=children_of(full)))
    kinds = ("ConfigMap", "Service", "Deployment", "NetworkPolicy")
    removed = {f"{kind} sums-agent-search" for kind in kinds}
    assert {f"{kind} {name}" for kind, name in made.delete} == removed | {"Job sums-head"}


def test_names_of_an_agents_children_are_dns_labels_for_the_longest_names():
    job = load("agent")
    job.metadata.name, job.spec.agent.tools[0].name = "j" * 40, "t" * 15
    names = [child["metadata"]["name"] for child in children_of(job).values()]
    assert max(map(len, names)) <= 63
    assert f"{'j' * 40}-agent-{'t' * 15}" in names


def test_existing_token_is_kept():
    job = load("smallest")
    stored = ObservedState(children=children_of(job))
    again = plan_job(job, stored, NOW, new_token=lambda: pytest.fail("a new token under running Pods"))
    assert {key_of(c): c for c in again.children} == stored.children


def test_tokens_of_new_jobs_are_no_immutable_secrets_and_earlier_ones_stay():
    """A kubelet reads an immutable one once, and a deleted job may have left a Pod on the node that has another."""
    job, key = load("smallest"), ("Secret", "gsm8k-token")
    stored = children_of(job)
    assert "immutable" not in stored[key]
    stored[key] |= {"immutable": True}
    found = {key_of(c): c for c in make_plan(job, ObservedState(children=stored)).children}
    assert found == stored, "the API server would refuse to change it"


def head_of(job, observed):
    return next(c for c in make_plan(job, observed).children if key_of(c) == ("Job", "gsm8k-head"))


def with_model(observed, name, **changes):
    manifest = observed.reward_models[name].model_dump(mode="json", by_alias=True)
    for part, change in changes.items():
        manifest[part] = manifest[part] | change
    changed_model = RewardModel.model_validate(manifest)
    return replace(observed, reward_models=observed.reward_models | {name: changed_model})


def test_head_restarts_for_a_recreated_model_but_not_for_its_replicas():
    job, observed = load("reward-models"), load_observed("reward-models")
    before = head_of(job, observed)
    assert head_of(job, with_model(observed, "math", spec={"replicas": 7, "slots": 3})) == before
    assert head_of(job, with_model(observed, "math", metadata={"uid": "another"})) != before, "its token is another"
    url = {"http": {"url": "http://other:1"}}
    assert head_of(job, with_model(observed, "judge", spec=url)) != before


def test_running_head_is_unchanged_while_a_model_is_missing():
    job, observed = load("reward-models"), load_observed("reward-models")
    running = replace(observed, children={key_of(c): c for c in make_plan(job, observed).children}, reward_models={})
    made = make_plan(job, running)
    held = {("Job", "gsm8k-head"), ("NetworkPolicy", "gsm8k-head"), ("ConfigMap", "gsm8k-config")}
    assert not held & {key_of(child) for child in made.children}
    assert made.delete == ()
    earlier = dict.fromkeys([ChildKey("NetworkPolicy", "gsm8k-trainer")], running.children["Secret", "gsm8k-token"])
    upgraded = replace(running, children=running.children | earlier)
    assert make_plan(job, upgraded).delete == (), "the head's policy does not hold for the trainers yet"
    whole = replace(upgraded, reward_models=observed.reward_models)
    assert make_plan(job, whole).delete == tuple(earlier), "it does now, and no Pod is replaced"
    running = next(c for c in made.status.conditions if c.type == "Running")
    assert "RewardModel math does not exist" in running.message


def test_gang_that_backs_off_releases_the_nodes_of_its_head_while_a_model_is_missing():
    job, observed = load("reward-models"), load_observed("reward-models")
    children = {key_of(c): c for c in make_plan(job, observed).children}
    job = changed(job, "scheduling.gang", "gates")
    job.status.not_before = NOW + timedelta(seconds=60)
    made = make_plan(job, replace(observed, children=children, reward_models={}))
    assert {*made.delete} == {key for key in children if key.kind in POD_KINDS}


def test_job_gets_pods_when_its_model_appears():
    job, missing = load("reward-model-missing"), load_observed("reward-model-missing")
    first = make_plan(job, missing)
    assert not {child["kind"] for child in first.children} & set(WORKLOAD_KINDS)
    seen = {key_of(child): child for child in first.children}
    second = make_plan(job, replace(load_observed("reward-models"), children=seen))
    assert {"Job", "StatefulSet", "Deployment"} <= {child["kind"] for child in second.children}


def test_new_jobs_have_different_tokens():
    first, second = (plan_job(load("smallest"), ObservedState(), NOW).children[0]["data"] for _ in range(2))
    assert first != second


def test_render_reports_every_problem():
    with pytest.raises(UserError) as error:
        render_children(load("invalid"), "t")
    assert len(str(error.value).splitlines()) == 4


def test_render_without_uid_gives_children_without_owner():
    job = load("smallest")
    job.metadata.uid = ""
    assert all("ownerReferences" not in child["metadata"] for child in render_children(job, "t"))


def test_job_managed_by_another_controller_is_left_alone():
    job = changed(load("smallest"), "managedBy", "kueue.x-k8s.io/multikueue")
    made = make_plan(job, ObservedState(children=children_of(load("smallest"))))
    assert (made.children, made.delete, made.status, made.events) == ((), (), job.status, ())


def test_job_being_deleted_is_left_to_the_garbage_collector():
    manifest = load("smallest").model_dump(mode="json", by_alias=True)
    manifest["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert make_plan(RLJob.model_validate(manifest)).children == ()


def test_job_whose_deletion_waits_for_a_finalizer_says_so_and_releases_its_pods():
    simulation = JobSimulation(load("smallest"))
    simulation.reconcile()
    services = {key for key in simulation.children if key.kind == "Service"}
    manifest = simulation.job.model_dump(mode="json", by_alias=True)
    manifest["metadata"] |= {
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "finalizers": ["foregroundDeletion", "example.com/keep"],
    }
    simulation.job = RLJob.model_validate(manifest)
    simulation.reconcile()
    assert not simulation.has_workloads()
    assert services <= simulation.children.keys(), "the garbage collector deletes what holds no nodes"
    simulation.reconcile()
    assert simulation.writes == 0
    condition = next(c for c in simulation.job.status.conditions if c.type == "Suspended")
    assert (simulation.job.status.phase, condition.status, condition.reason) == ("Suspended", "True", "Deleting")
    assert "waits for who set the finalizers example.com/keep;" in condition.message


def test_pods_of_a_job_that_is_deleted_without_its_children_stay():
    manifest = load("smallest").model_dump(mode="json", by_alias=True)
    manifest["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["orphan", "example.com/keep"]}
    observed = ObservedState(children=children_of(load("smallest")))
    assert make_plan(RLJob.model_validate(manifest), observed).delete == ()


def test_removed_reward_loses_only_its_own_children():
    full = load("full")
    fewer = changed(full, "rewards", [full.spec.rewards[0].model_dump(mode="json", by_alias=True)])
    made = make_plan(fewer, ObservedState(children=children_of(full)))
    gone = {f"{kind} {name}" for kind, name in made.delete}
    removed = {f"{kind} full-reward-style" for kind in ("ConfigMap", "Service", "Deployment", "NetworkPolicy")}
    assert gone == removed | {"Job full-head"}, "the driver reads the rewards, so its Job is replaced"


def test_head_with_changed_configuration_is_deleted_then_recreated():
    job = load("smallest")
    stored = children_of(job)
    newer = changed(job, "algorithm.loss.clipHigh", 0.28)
    first = make_plan(newer, ObservedState(children=stored))
    assert first.delete == (("Job", "gsm8k-head"),)
    assert not [c for c in first.children if c["kind"] in WORKLOAD_KINDS]
    without = {key: child for key, child in stored.items() if key.kind != "Job"}
    assert ("Job", "gsm8k-head") in {key_of(c) for c in make_plan(newer, ObservedState(children=without)).children}


def children_of_earlier(job):
    earlier = job.model_copy(deep=True)
    earlier.metadata.uid = "earlier"
    return children_of(earlier)


def test_children_of_an_earlier_job_are_deleted_and_block_the_new_one():
    job = load("smallest")
    stored = children_of_earlier(job)
    stored[("Job", "gsm8k-head")]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    made = make_plan(job, ObservedState(children=stored))
    assert made.children == (), "none is adopted"
    assert set(made.delete) == set(stored), "garbage collection can miss an owner's end"
    assert len(made.delete) == len(stored), "each once"
    assert made.status.phase == "Pending", "the end of another job is not ours"
    assert made.requeue_after_seconds == 1.0


@pytest.mark.parametrize("spec", [{"suspend": True}, {"trainer": {"gpusPerReplica": 0, "template": {"spec": 1}}}])
def test_children_of_an_earlier_job_are_deleted_in_every_state(spec):
    job = load("smallest")
    for path, value in spec.items():
        job = changed(job, path, value)
    stored = children_of_earlier(load("smallest"))
    assert set(make_plan(job, ObservedState(children=stored)).delete) >= set(stored)


def test_terminating_children_of_an_earlier_job_are_not_deleted_again():
    job = load("smallest")
    stored = children_of_earlier(job)
    for child in stored.values():
        child["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert make_plan(job, ObservedState(children=stored)).delete == ()


@pytest.mark.parametrize(
    "change",
    [
        {"ownerReferences": []},
        {"labels": {LABEL_JOB: "gsm8k"}},
        {"reference": {"kind": "RewardModel"}},
        {"reference": {"kind": "RLJob", "apiVersion": "example.org/v1alpha1"}},
        {"reference": {"name": "gsm8k-2"}},
        {"reference": {"controller": False}},
    ],
)
def test_foreign_object_is_never_deleted(change):
    job = load("smallest")
    stored = children_of_earlier(job)
    metadata = stored[("ConfigMap", "gsm8k-config")]["metadata"]
    metadata["ownerReferences"] = [metadata["ownerReferences"][0] | change.pop("reference", {})]
    metadata |= change
    made = make_plan(job, ObservedState(children=stored))
    assert ("ConfigMap", "gsm8k-config") not in made.delete
    assert len(made.delete) == len(stored) - 1


@pytest.mark.parametrize("earlier", [True, False])
def test_pods_of_an_earlier_job_are_ignored(earlier):
    job = load("smallest")
    head = children_of_earlier(job)[("Job", "gsm8k-head")]["spec"]["template"]
    if not earlier:
        head = children_of(job)[("Job", "gsm8k-head")]["spec"]["template"]
    status = {"phase": "Succeeded", "conditions": [{"type": "Ready", "status": "True"}]}
    pod = {"kind": "Pod", **head, "metadata": head["metadata"] | {"name": "gsm8k-head-x"}, "status": status}
    made = make_plan(job, ObservedState(pods=(pod,)))
    assert made.status.roles[0].ready == (0 if earlier else 1)
    assert {key_of(child) for child in made.children} == set(children_of(job)), "its own are created"


def test_job_file_above_the_configmap_limit_is_invalid():
    source = "def compute_score(): ...\n" + "# text\n" * 30_000
    rewards = [{"name": f"r{index}", "function": {"inline": source}} for index in range(5)]
    job = changed(load("smallest"), "rewards", rewards)
    made = make_plan(job)
    assert (made.children, made.status.phase) == ((), "Failed")
    (message,) = [c.message for c in made.status.conditions if c.type == "Failed"]
    assert "bytes as a ConfigMap" in message
    assert "function.configMapKeyRef" in message
    with pytest.raises(UserError, match="bytes as a ConfigMap"):
        render_children(job, "t")


def test_deleted_token_is_replaced_and_restarts_all_roles():
    """As docs/security.md says: this rotates the token."""
    simulation, key = JobSimulation(make_job()), ChildKey("Secret", "gsm8k-token")
    simulation.reconcile()
    before = dict(simulation.children)
    observed = ObservedState({other: child for other, child in before.items() if other != key})
    made = plan_job(simulation.job, observed, simulation.now, new_token=lambda: "new")
    (secret,) = (child for child in made.children if child["kind"] == "Secret")
    assert read_token(secret) == "new"
    simulation.children[key] = secret
    for _ in range(3):  # the head and the trainers are deleted first
        simulation.reconcile()
    workloads = [other for other in before if other.kind in WORKLOAD_KINDS]
    assert len(workloads) == 4
    for other in workloads:
        assert simulation.children[other]["spec"]["template"] != before[other]["spec"]["template"], other
