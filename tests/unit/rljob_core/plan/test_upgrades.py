"""What an upgrade of the operator, a change of the spec and a request to restart do to the Pods of each role."""

import copy
from datetime import UTC, datetime

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rljob_api import __version__
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_core.backend import ChildKey, ObservedState, key_of
from rljob_core.children import common, head, keep, pods, rollout, service, trainer
from rljob_core.children.difference import contains, stamp
from rljob_core.defaults import DEFAULTS, image_tag
from rljob_core.plan import conditions
from rljob_core.plan.job import plan_job
from rljob_core.plan.reward_model import plan_reward_model
from tests.support.job_simulation import JobSimulation, make_agent_job, make_job, make_program_job

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HEAD = ChildKey("Job", "gsm8k-head")
TRAINER = ChildKey("StatefulSet", "gsm8k-trainer")
ROLLOUT = ChildKey("Deployment", "gsm8k-rollout")
REWARD = ChildKey("Deployment", "gsm8k-reward-correct")
ROLES = {"head": HEAD, "trainer": TRAINER, "rollout": ROLLOUT, "reward-correct": REWARD}
IMAGES = {"trainer_image": "rljob/trainer:0.3.0", "reward_image": "rljob/reward:0.3.0"}
NEWER = DEFAULTS.model_copy(update=IMAGES | {"log_format": "json"})
MUTABLE = {"replicas", "strategy", "backoffLimit", "parallelism"}


def change_code(monkeypatch, number=1):
    """What a later version may change: graces, probes, commands, env, and its own number."""
    monkeypatch.setattr(pods, "_PATIENCE_SECONDS", 60 + number)
    monkeypatch.setattr(trainer, "GRACE_SECONDS", 60 + number)
    monkeypatch.setattr(rollout, "_GRACE_SECONDS", 60 + number)
    monkeypatch.setattr(service, "_DRAIN_SECONDS", 10 + number)
    monkeypatch.setattr(pods, "build_readiness", lambda port: {"tcpSocket": {"port": port}, "periodSeconds": number})
    monkeypatch.setattr(pods, "KEEP_ANNOTATIONS", {"example.org/keep": str(number)})
    monkeypatch.setattr(common, "__version__", f"{__version__}-next{number}")


class Operated(JobSimulation):
    """A simulation of the API server's rules, which knows which roles lost their Pods."""

    def __init__(self, **spec):
        super().__init__(make_job(**spec))
        self.incarnations = dict.fromkeys(ROLES.values(), 0)

    def reconcile(self, seconds=1, **pods_):
        before = dict(self.children)
        made = super().reconcile(seconds, **pods_)
        for key in ROLES.values():
            self.incarnations[key] += key in made.delete
            if (old := before.get(key)) and (new := self.children.get(key)) and key not in made.delete:
                assert key.kind != "Job" or without(old, MUTABLE) == without(new, MUTABLE), "a Job's spec is immutable"
        return made

    def settle(self):
        for _ in range(5):
            self.reconcile()
        assert self.writes == 0, "it converges"

    def edit(self, **spec):
        """Replace sections of spec."""
        changed = self.job.model_dump(mode="json", by_alias=True)
        changed["spec"] |= spec
        changed["metadata"]["generation"] += 1
        self.job = RLJob.model_validate(changed)

    def request(self, name, value):
        self.job.metadata.annotations[name] = value

    def run(self):
        """The status of a job that runs."""
        running = conditions.build_condition(self.job.status, "Running", True, "Running", "", generation=1, now=NOW)
        self.job = self.job.model_copy(update={"status": self.job.status.model_copy(update={"conditions": [running]})})

    def pods_of(self):
        """What identifies the Pods of each role."""
        return {
            name: (self.incarnations[key], copy.deepcopy(self.children[key]["spec"]["template"]))
            for name, key in ROLES.items()
            if key in self.children
        }

    def images(self):
        return {role.name: role.image for role in self.job.status.roles}


def without(workload, fields):
    return {name: value for name, value in workload["spec"].items() if name not in fields}


def replaced(before, after):
    return {name for name in before if before[name] != after.get(name)}


@pytest.fixture
def operated():
    simulation = Operated()
    simulation.settle()
    return simulation


@pytest.fixture
def upgraded(operated, monkeypatch):
    operated.before = operated.pods_of()
    change_code(monkeypatch)
    operated.defaults = NEWER
    operated.reconcile()
    assert operated.writes == 0, "an upgrade of 5,000 jobs costs no write"
    operated.settle()
    return operated


def test_upgrade_keeps_the_pods_of_every_role(upgraded):
    assert replaced(upgraded.before, upgraded.pods_of()) == set()
    fresh = {key_of(child): child for child in plan_job(make_job(), ObservedState(), NOW, defaults=NEWER).children}
    for name, key in ROLES.items():
        assert fresh[key]["spec"]["template"] != upgraded.children[key]["spec"]["template"], f"{name} would differ"
    assert set(upgraded.images().values()) == {DEFAULTS.trainer_image, DEFAULTS.reward_image}


@pytest.mark.parametrize(
    ("make", "restarted", "other"),
    [(make_agent_job, "agent-user", "agent-calculator"), (make_program_job, "agent-runner", "rollout")],
)
def test_upgrade_keeps_the_pods_of_an_agent_until_their_restart_is_requested(monkeypatch, make, restarted, other):
    simulation = JobSimulation(make())
    keys = {name: ChildKey("Deployment", f"gsm8k-{name}") for name in (restarted, other)}

    def read_templates():
        return {name: copy.deepcopy(simulation.children[key]["spec"]["template"]) for name, key in keys.items()}

    for _ in range(3):
        simulation.reconcile()
    before = read_templates()
    change_code(monkeypatch)
    simulation.defaults = NEWER
    simulation.reconcile()
    assert (simulation.writes, read_templates()) == (0, before)
    simulation.job.metadata.annotations[f"rljob.dev/restart-{restarted}"] = "now"
    simulation.reconcile()
    after = read_templates()
    assert after[other] == before[other]
    assert after[restarted]["spec"]["containers"][0]["image"] == NEWER.reward_image


@pytest.mark.parametrize("defaults", [NEWER, DEFAULTS])
def test_upgrade_keeps_what_is_immutable(operated, monkeypatch, defaults):
    before = {key: copy.deepcopy(without(operated.children[key], MUTABLE)) for key in ROLES.values()}
    original = head.pods.build_workload

    def build_other(*args, **options):
        service, workload = original(*args, **options)
        return [service, workload | {"spec": workload["spec"] | {"podFailurePolicy": {"rules": []}}}]

    monkeypatch.setattr(head.pods, "build_workload", build_other)
    operated.defaults = defaults
    operated.settle()
    assert {key: without(operated.children[key], MUTABLE) for key in ROLES.values()} == before


def test_version_is_that_of_what_runs(upgraded):
    def read_version(name):
        workload = upgraded.children[ROLES[name]]
        holders = (workload, workload["spec"]["template"])
        [version] = {holder["metadata"]["labels"]["app.kubernetes.io/version"] for holder in holders}
        return version

    assert {read_version(name) for name in ROLES} == {image_tag()}
    upgraded.request("rljob.dev/restart-rollout", "now")
    upgraded.settle()
    expected = dict.fromkeys(ROLES, image_tag()) | {"rollout": f"{image_tag()}-next1"}
    assert {name: read_version(name) for name in ROLES} == expected


def test_mutable_fields_apply_after_an_upgrade(upgraded):
    upgraded.edit(rollout={"replicas": 3}, head={"backoffLimit": 2})
    upgraded.settle()
    assert upgraded.children[ROLLOUT]["spec"]["replicas"] == 3
    assert replaced(upgraded.before, upgraded.pods_of()) == set()


CHANGES = {
    "head": {"algorithm": {"loss": {"clipHigh": 0.3}}},
    "trainer": {"trainer": {"env": {"A": "1"}}},
    "rollout": {"rollout": {"image": "mine"}},
    "reward-correct": {"rewards": [{"name": "correct", "function": {"inline": "def other(): ..."}}]},
}


@pytest.mark.parametrize("role", CHANGES)
def test_change_of_the_user_rolls_only_its_role(operated, role):
    before = operated.pods_of()
    operated.edit(**CHANGES[role])
    operated.settle()
    assert replaced(before, operated.pods_of()) == {role}


@pytest.mark.parametrize("role", CHANGES)
def test_change_after_an_upgrade_rolls_its_role_and_all_of_the_ray_cluster(upgraded, role):
    upgraded.edit(**CHANGES[role])
    upgraded.settle()
    rolled = {"head", "trainer"} if role in ("head", "trainer") else {role}
    assert replaced(upgraded.before, upgraded.pods_of()) == rolled
    newer = {name for name, image in upgraded.images().items() if image.endswith("0.3.0")}
    assert newer == rolled - {"rollout"}, "its own image"


NAMED, UNNAMED, OTHER = {"serviceAccountName": "default"}, {"serviceAccountName": None}, {"serviceAccountName": "a"}


@pytest.mark.parametrize(
    ("before", "edits", "rolls"),
    [
        (UNNAMED, [NAMED], set()),
        (NAMED, [UNNAMED, NAMED], set()),
        (NAMED, [UNNAMED | CHANGES["rollout"], NAMED], {"rollout"}),
        (UNNAMED, [NAMED | {"imagePullSecrets": [{"name": "more"}]}], set(ROLES)),
        (NAMED, [OTHER], set(ROLES)),
    ],
)
@pytest.mark.parametrize("is_upgraded", [False, True])
def test_name_of_the_default_service_account_replaces_no_pod(monkeypatch, before, edits, rolls, is_upgraded):
    operated = Operated(**before)
    operated.settle()
    if is_upgraded:
        change_code(monkeypatch)
        operated.defaults = NEWER
    pods_ = operated.pods_of()
    for edit in edits:
        operated.edit(**edit)
        operated.settle()
    assert replaced(pods_, operated.pods_of()) == rolls


@pytest.mark.parametrize("field", ["resources", "nodePool", "template", "image"])
def test_each_pod_field_rolls_a_reward_after_an_upgrade(upgraded, field):
    value = {
        "resources": {"limits": {"memory": "1Gi"}},
        "nodePool": {"exclusive": True},
        "template": {"metadata": {"labels": {"team": "a"}}},
        "image": "mine",
    }[field]
    upgraded.edit(rewards=[upgraded.job.spec.rewards[0].model_dump(mode="json", by_alias=True) | {field: value}])
    upgraded.settle()
    assert replaced(upgraded.before, upgraded.pods_of()) == {"reward-correct"}


def test_head_is_not_created_while_trainers_of_an_earlier_version_exist(upgraded):
    """Whichever of the two deletions or creations fails, the next reconcile continues."""
    upgraded.edit(algorithm={"loss": {"clipHigh": 0.3}})
    made = upgraded.reconcile()
    assert set(made.delete) == {HEAD, TRAINER}
    assert not {key_of(child) for child in made.children} & set(ROLES.values())
    upgraded.children[TRAINER] = stamp(
        next(c for c in plan_job(make_job(), ObservedState(), NOW).children if key_of(c) == TRAINER)
    )  # its deletion failed
    made = upgraded.reconcile()
    assert (made.delete, HEAD in {key_of(child) for child in made.children}) == ((TRAINER,), False)


@pytest.mark.parametrize("lost", [HEAD, TRAINER])
def test_workload_deleted_by_hand_returns_with_the_rest_of_its_ray_cluster(upgraded, lost):
    del upgraded.children[lost]
    upgraded.settle()
    assert replaced(upgraded.before, upgraded.pods_of()) == {"head", "trainer"}
    upgraded.before = upgraded.pods_of()
    del upgraded.children[lost]
    upgraded.settle()
    assert replaced(upgraded.before, upgraded.pods_of()) == set(), "of the same version"


def test_edit_by_hand_is_reverted_and_does_not_outlast_a_change(operated):
    before = copy.deepcopy(operated.children[ROLLOUT]["spec"]["template"])
    operated.children[ROLLOUT]["spec"]["template"]["spec"]["containers"][0]["image"] = "by-hand"
    operated.reconcile()
    assert operated.children[ROLLOUT]["spec"]["template"] == before


def test_rollback_of_the_operator_keeps_the_pods(upgraded):
    upgraded.edit(rollout={"env": {"A": "1"}})
    upgraded.settle()
    before = upgraded.pods_of()
    upgraded.defaults = DEFAULTS
    upgraded.settle()
    assert replaced(before, upgraded.pods_of()) == set(), "neither those of the later version nor the others"


@pytest.mark.parametrize(("is_running", "rolls"), [(True, set()), (False, set(ROLES))])
def test_changed_scheduling_matters_until_the_job_runs(operated, is_running, rolls):
    operated.defaults = NEWER
    before = operated.pods_of()
    if is_running:
        operated.run()
    operated.edit(scheduling={"gang": "gates", "schedulerName": "other"})
    operated.reconcile()
    if is_running:
        operated.run()
    operated.reconcile()
    assert replaced(before, operated.pods_of()) == rolls


def test_trainers_are_left_alone_with_the_head_while_a_reward_model_is_missing(operated, monkeypatch):
    simulation = Operated(rewards=[{"name": "shared", "rewardModelRef": {"name": "math"}}])
    metadata = {"name": "math", "uid": "m1"}
    model = RewardModel.model_validate({"metadata": metadata, "spec": {"function": {"inline": "def f(): ..."}}})
    planned = plan_job(simulation.job, ObservedState(reward_models={"math": model}), NOW, new_token=lambda: "t")
    simulation.children = {key_of(child): stamp(child) for child in planned.children}
    before = simulation.pods_of()
    simulation.defaults = NEWER
    simulation.edit(trainer={"env": {"A": "1"}})
    simulation.settle()
    assert replaced(before, simulation.pods_of()) == set()


@pytest.mark.parametrize("role", [None, *ROLES])
def test_request_rolls_its_roles_with_the_current_template(upgraded, role):
    upgraded.request("rljob.dev/restart" + (f"-{role}" if role else ""), "1")
    upgraded.settle()
    rolled = {role} if role else set(ROLES)
    rolled |= {"head", "trainer"} if rolled & {"head", "trainer"} else set()
    assert replaced(upgraded.before, upgraded.pods_of()) == rolled
    assert {name for name, image in upgraded.images().items() if image.endswith("0.3.0")} == rolled
    assert all(each.restarts == 0 for each in upgraded.job.status.roles)


@pytest.mark.parametrize("role", ROLES)
def test_request_without_an_upgrade_rolls_only_its_role(operated, role):
    before = operated.pods_of()
    operated.request(f"rljob.dev/restart-{role}", "1")
    operated.settle()
    assert replaced(before, operated.pods_of()) == {role}
    before = operated.pods_of()
    operated.settle()
    assert replaced(before, operated.pods_of()) == set(), "once"


def plan_model(children, defaults=DEFAULTS, annotations=(), **spec):
    metadata = {"name": "judge", "namespace": "ns", "uid": "u", "annotations": dict(annotations)}
    model = RewardModel.model_validate({"metadata": metadata, "spec": {"function": {"inline": "x"}} | spec})
    return plan_reward_model(model, ObservedState(children=children), NOW, defaults=defaults, new_token=lambda: "t")


@pytest.mark.parametrize(
    ("change", "rolls"),
    [
        ({}, False),
        ({"replicas": 3}, False),
        ({"env": {"A": "1"}}, True),
        ({"annotations": {"rljob.dev/restart": "1"}}, True),
    ],
)
def test_reward_model_is_kept_over_an_upgrade(monkeypatch, change, rolls):
    key = ChildKey("Deployment", "judge-rewardmodel")
    children = {key_of(child): stamp(child) for child in plan_model({}).children}
    change_code(monkeypatch)
    first = plan_model(children, NEWER)  # records the configuration
    children |= {key_of(child): stamp(child) for child in first.children}
    made = plan_model(children, NEWER, **change)
    deployment = next(child for child in made.children if child["kind"] == "Deployment")
    assert (deployment["spec"]["template"] != children[key]["spec"]["template"]) == rolls
    assert deployment["spec"]["replicas"] == change.get("replicas", 1)
    assert made.status.image == (NEWER if rolls else DEFAULTS).reward_image
    assert made.delete == ()
    if not change:
        assert all(contains(children[key_of(child)], stamp(child)) for child in made.children), "it settles"


def test_workload_of_a_reward_model_gets_no_label_that_its_version_did_not_know(monkeypatch):
    """As those of c56f54c2, which had no app.kubernetes.io/name: a write would be its second generation."""
    children = {key_of(child): child for child in plan_model({}).children}
    for child in children.values():
        del child["metadata"]["labels"]["app.kubernetes.io/name"]
    children = {key: stamp(child) for key, child in children.items()}
    change_code(monkeypatch)
    made = {key_of(child): stamp(child) for child in plan_model(children, NEWER).children}
    written = {key.kind for key in made if not contains(children[key], made[key])}
    assert written == {"Secret", "ConfigMap", "Service", "NetworkPolicy"}


@pytest.mark.parametrize(
    ("before", "after", "rolls"),
    [
        (UNNAMED, NAMED, False),
        (NAMED, UNNAMED | {"replicas": 3}, False),
        (NAMED, UNNAMED | {"env": {"A": "1"}}, True),
        (UNNAMED, OTHER, True),
        (OTHER, NAMED, True),
    ],
)
@pytest.mark.parametrize("is_upgraded", [False, True])
def test_name_of_the_default_service_account_replaces_no_pod_of_a_reward_model(
    monkeypatch, before, after, rolls, is_upgraded
):
    children = {key_of(child): stamp(child) for child in plan_model({}, **before).children}
    templates = [child["spec"]["template"] for child in children.values() if child["kind"] == "Deployment"]
    if is_upgraded:
        change_code(monkeypatch)
    for _ in range(2):
        made = plan_model(children, NEWER if is_upgraded else DEFAULTS, **after)
        children |= {key_of(child): stamp(child) for child in made.children}
    templates += [child["spec"]["template"] for child in made.children if child["kind"] == "Deployment"]
    assert (templates[0] != templates[1]) == rolls
    assert made.delete == ()


class UpgradeMachine(RuleBasedStateMachine):
    """Pods of a role are replaced if and only if its configuration changes. Head and trainers run one version."""

    @initialize()
    def create(self):
        self.monkeypatch = pytest.MonkeyPatch()
        self.operated = Operated()
        self.number = 0
        self.env: dict[str, str] = {}
        self.operated.settle()
        self.version = dict.fromkeys(ROLES, 0)
        self.expected = self.operated.pods_of()

    def teardown(self):
        if hasattr(self, "monkeypatch"):
            self.monkeypatch.undo()

    def expect(self, rolled):
        """Settle, and compare with the roles that must have new Pods."""
        if rolled & {"head", "trainer"} and len({self.version["head"], self.version["trainer"], self.number}) > 1:
            rolled = rolled | {"head", "trainer"}
        self.operated.settle()
        if self.operated.job.spec.suspend:
            assert self.operated.pods_of() == {}
            return
        after = self.operated.pods_of()
        assert replaced(self.expected, after) == rolled
        self.version |= dict.fromkeys(rolled, self.number)
        self.expected = after

    @rule(images=st.booleans(), code=st.booleans())
    def upgrade(self, images, code):
        self.number += 1
        if images or not code:
            new = {"trainer_image": f"trainer:{self.number}", "reward_image": f"reward:{self.number}"}
            self.operated.defaults = DEFAULTS.model_copy(update=new)
        change_code(self.monkeypatch, self.number)
        self.expect(set())

    @rule(role=st.sampled_from(sorted(ROLES)), value=st.sampled_from("abc"))
    def edit(self, role, value):
        spec = {"env": {"VALUE": value}}
        section = {role: spec}
        if role == "reward-correct":
            section = {"rewards": [{"name": "correct", "function": {"inline": "def reward(): ..."}} | spec]}
        is_changed = self.env.get(role) != value
        self.env[role] = value
        self.operated.edit(**section)
        self.expect({role} if is_changed else set())

    @rule(role=st.sampled_from(["", *sorted(ROLES)]), value=st.sampled_from("123"))
    def request(self, role, value):
        name = f"rljob.dev/restart{'-' if role else ''}{role}"
        is_changed = self.operated.job.metadata.annotations.get(name) != value
        self.operated.request(name, value)
        self.expect(({role} if role else set(ROLES)) if is_changed else set())

    @rule(replicas=st.integers(1, 4))
    def scale(self, replicas):
        env = {"env": {"VALUE": self.env["rollout"]}} if "rollout" in self.env else {}
        self.operated.edit(rollout={"replicas": replicas} | env)
        self.expect(set())

    @precondition(lambda self: not self.operated.job.spec.suspend)
    @rule()
    def suspend(self):
        self.operated.edit(suspend=True)
        self.expect(set())

    @precondition(lambda self: self.operated.job.spec.suspend)
    @rule()
    def resume(self):
        self.operated.edit(suspend=False)
        self.operated.settle()
        self.version = dict.fromkeys(ROLES, self.number)
        self.expected = self.operated.pods_of()

    @invariant()
    def ray_cluster_has_one_image(self):
        if hasattr(self, "operated"):
            images = self.operated.images()
            assert images["head"] == images["trainer"]


TestUpgradeMachine = UpgradeMachine.TestCase
TestUpgradeMachine.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)


SPARSE, DENSE = ({"checkpoint": {"everySteps": every}, "outageSeconds": 100 * every} for every in (9, 5))


def test_field_that_the_driver_reads_again_replaces_nothing():
    simulation = Operated(**SPARSE)
    simulation.settle()
    before = simulation.pods_of()
    simulation.edit(**DENSE)
    simulation.settle()
    assert replaced(before, simulation.pods_of()) == set()
    config = simulation.children[ChildKey("ConfigMap", "gsm8k-config")]["data"]["job.yaml"]
    assert "everySteps: 5" in config
    assert "outageSeconds: 500" in config


def test_head_that_reads_them_once_stays_until_one_of_them_changes(monkeypatch):
    simulation = Operated(**SPARSE)
    with monkeypatch.context() as earlier:
        build = pods.record_configuration
        earlier.setattr(pods, "record_configuration", lambda *arguments: build(*arguments[:3], {}))
        simulation.settle()
    before = simulation.pods_of()
    simulation.defaults = NEWER
    simulation.settle()
    assert replaced(before, simulation.pods_of()) == set()
    simulation.edit(**DENSE)
    simulation.settle()
    assert replaced(before, simulation.pods_of()) == {"head", "trainer"}, "one version in a Ray cluster"
    before = simulation.pods_of()
    simulation.edit(**SPARSE)
    simulation.settle()
    assert replaced(before, simulation.pods_of()) == set()


HANGS = [{"hangDetection": {"minSeconds": seconds}} for seconds in (70, 80, 90)]
SAMPLINGS = [{"rollout": {"sampling": {"temperature": value}}} for value in (0.7, 0.8, 0.9)]


@pytest.mark.parametrize(
    ("specs", "roles"), [(HANGS, {"head", "trainer", "rollout"}), (SAMPLINGS, {"head", "trainer"})]
)
def test_pods_that_read_a_field_once_are_replaced_when_it_changes(monkeypatch, specs, roles):
    simulation = Operated(**specs[0])
    with monkeypatch.context() as earlier:
        build = pods.record_configuration
        kept = keep.ANNOTATION_AT_START
        earlier.setattr(
            pods,
            "record_configuration",
            lambda *given: build(*given[:3], {name: part for name, part in given[3].items() if name == kept}),
        )
        simulation.settle()
    before = simulation.pods_of()
    simulation.defaults = NEWER
    simulation.settle()
    assert replaced(before, simulation.pods_of()) == set(), "an upgrade"
    for spec, expected in zip(specs[1:], (roles, set()), strict=True):
        simulation.edit(**spec)
        simulation.settle()
        assert replaced(before, simulation.pods_of()) == expected
        before = simulation.pods_of()
