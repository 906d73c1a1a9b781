"""What the pages about installation, Kueue and trackers show: manifests fit the job that follows, commands exist."""

import re
from collections import Counter
from itertools import pairwise

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from rljob_api.manifest.job import RLJob
from rljob_api.read.load import load_manifests
from rljob_cli.main import app
from rljob_core.children import build_children
from rljob_core.children.gang import LABEL_KUEUE_QUEUE
from rljob_core.defaults import DEFAULTS
from rljob_core.plan.validate import find_problems
from tests.paths import CHART, EXAMPLES, ROOT
from tests.support.job_simulation import make_job
from tests.support.pages import read_blocks, read_commands, read_object, read_objects

CLUSTERS = ["install/eks.md", "install/gke.md", "install/on-premises.md"]
PAGES = [*CLUSTERS, "install/laptop.md", "one-gpu.md", "kueue.md", "trackers.md"]
OTHERS = {"aws", "docker", "eksctl", "export", "gcloud", "head", "source", "tensorboard", "trackio", "uv"}
"""Commands of others, which no test runs."""
KUBECTL = {"apply", "config", "create", "edit", "get", "label", "rollout", "taint"}
CLI = get_command(app).commands
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

each_cluster = pytest.mark.parametrize("page", CLUSTERS)


def read_options(command, name):
    """Return the values of an option that may be repeated, as `--name=value` or `--name value`."""
    joined = [part.partition("=")[2] for part in command if part.startswith(f"{name}=")]
    return joined + [value for part, value in pairwise(command) if part == name]


def check_rljob(name, *arguments):
    known = {option for parameter in CLI[name].params for option in parameter.opts}
    assert {part for part in arguments if part.startswith("-")} <= known
    for part in arguments:
        assert not part.startswith("examples/") or (ROOT / part).is_file()


def check_make(*arguments):
    [target] = [part for part in arguments if "=" not in part]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def check_helm(verb, *arguments):
    assert verb in ("install", "repo", "test")
    if "charts/rljob" in arguments:
        for setting in read_options(arguments, "--set"):
            value = VALUES
            for key in setting.partition("=")[0].split("."):
                value = value[key]


def check_kubectl(*arguments):
    words = [part for before, part in pairwise(("", *arguments)) if before != "-n" and part[0] != "-"]
    if words[0] == "rljob":
        check_rljob(*arguments[arguments.index("rljob") + 1 :])
    else:
        assert words[0] in KUBECTL


def check_python(option, module, *_):
    assert option == "-m"
    assert list(ROOT.glob(f"*/{module.replace('.', '/')}.py")) or list(ROOT.glob(f"*/{module.replace('.', '/')}"))


CHECKS = {
    "rljob": check_rljob,
    "make": check_make,
    "helm": check_helm,
    "kubectl": check_kubectl,
    "python": check_python,
}


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_exist(page):
    commands = read_commands(page)
    assert commands
    for command in commands:
        assert command[0] in OTHERS | set(CHECKS), command
        if command[0] in CHECKS:
            CHECKS[command[0]](*command[1:])


@pytest.mark.parametrize("language", ["yaml", "bash"])
def test_every_block_of_the_pages_is_read(language):
    for page in PAGES:
        opened = re.findall(rf"^\s*```{language}", (ROOT / "docs" / page).read_text(), re.M)
        assert len(opened) == len(read_blocks(page, language))


def test_every_manifest_of_the_pages_is_of_a_kind_that_is_checked():
    checked = {"ClusterConfig", "StorageClass", "PersistentVolumeClaim", "ResourceFlavor", "ClusterQueue", "LocalQueue"}
    kinds = {each.get("kind") for page in PAGES for each in find_objects(page)}
    assert kinds == checked | {"RLJob", None}


def find_objects(page):
    return [each for block in read_blocks(page, "yaml") for each in yaml.safe_load_all(block)]


def test_steps_that_all_clusters_share_are_the_same():
    shared = [
        [block for block in read_blocks(page, "bash") if block.startswith(("EXTRA=gpu", "kubectl -n research apply"))]
        for page in CLUSTERS
    ]
    assert len(shared[0]) == 2
    assert shared[1:] == shared[:-1]


def read_submitted(page):
    """Return the job that the page submits, with the changes of its --set."""
    [command] = [each for each in read_commands(page) if "submit" in each]
    [path] = [part for part in command if part.startswith("examples/")]
    document = yaml.safe_load((ROOT / path).read_text())
    for setting in read_options(command, "--set"):
        name, _, value = setting.partition("=")
        *parents, last = name.split(".")
        place = document
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    for reward in document["spec"]["rewards"]:
        reward["function"] = {"inline": (EXAMPLES / "gpu" / reward["function"]["file"]).read_text()}
    return RLJob.model_validate(document)


@each_cluster
def test_first_job_fits_the_node_pool_claim_and_values_of_its_page(page):
    job = read_submitted(page)
    assert not find_problems(job)
    labels, taints = read_pool(page)
    for role in (job.spec.trainer, job.spec.rollout):
        assert role.node_pool.node_selector.items() <= labels.items()
        tolerated = {toleration.key for toleration in role.node_pool.tolerations}
        assert {taint.partition("=")[0] for taint in taints} <= tolerated
    claim = read_object(page, "PersistentVolumeClaim")
    assert job.spec.checkpoint.persistent_volume_claim.claim_name == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"], "trainers write to it, too"
    for storage in read_objects(page, "StorageClass"):
        assert claim["spec"]["storageClassName"] == storage["metadata"]["name"]
    [install] = [each for each in read_commands(page) if "charts/rljob" in each]
    assert job.spec.scheduling.gang == "gates"
    assert "features.schedulingGates=true" in read_options(install, "--set")
    assert "watchNamespaces={research}" in read_options(install, "--set")


def read_pool(page):
    """Return the labels of the page's GPU nodes, and their taints as KEY=VALUE:EFFECT."""
    for config in read_objects(page, "ClusterConfig"):
        [group] = (each for each in config["managedNodeGroups"] if "taints" in each)
        return group["labels"], [f"{each['key']}={each['value']}:{each['effect']}" for each in group["taints"]]
    commands = read_commands(page)
    given = [value for each in commands for value in read_options(each, "--node-labels")]
    given += [each[4] for each in commands if each[:3] == ["kubectl", "label", "node"]]
    taints = [each[4] for each in commands if each[:3] == ["kubectl", "taint", "node"]]
    return dict(label.split("=") for label in given), taints or ["nvidia.com/gpu=present:NoSchedule"]


@each_cluster
def test_storage_is_valid_in_kubernetes(page):
    for kind in ("StorageClass", "PersistentVolumeClaim"):
        for each in read_objects(page, kind):
            kubernetes_validate.validate(each, "1.34", strict=True)


@each_cluster
def test_cluster_enforces_the_network_policies_of_jobs(page):
    text = (ROOT / "docs" / page).read_text()
    assert (
        "enableNetworkPolicy" in text or "--enable-dataplane-v2" in text or "CNI that enforces NetworkPolicies" in text
    )


QUEUES = {kind: read_objects("kueue.md", kind) for kind in ("ResourceFlavor", "ClusterQueue", "LocalQueue")}
[CLUSTER_QUEUE], [LOCAL_QUEUE] = QUEUES["ClusterQueue"], QUEUES["LocalQueue"]
[GROUP] = CLUSTER_QUEUE["spec"]["resourceGroups"]


@pytest.fixture
def queued():
    """The job of the page about Kueue, and its workloads."""
    [block] = (each for each in read_blocks("kueue.md", "yaml") if "kind: RLJob" in each)
    [job] = load_manifests(block, "kueue.md")
    children = build_children(job, "token", DEFAULTS)
    return job, [child for child in children if "template" in child.get("spec", {})]


def read_requests(child):
    """Return what the Pods of a workload request together. A limit without a request is one."""
    total = Counter()
    spec = child["spec"]["template"]["spec"]
    for container in spec["containers"]:
        resources = container.get("resources", {})
        for name, amount in (resources.get("limits", {}) | resources.get("requests", {})).items():
            total[name] += read_quantity(amount) * child["spec"].get("replicas", 1)
    return total


def read_quantity(text):
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", str(text)).groups()
    return float(number) * {"": 1, "m": 1e-3, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[unit]


def choose_flavor(child):
    """Return the first flavor of the queue that a workload's Pods may have, as Kueue chooses it without quotas."""
    spec = child["spec"]["template"]["spec"]
    flavors = {each["metadata"]["name"]: each.get("spec", {}) for each in QUEUES["ResourceFlavor"]}
    keys = {key for flavor in flavors.values() for key in flavor.get("nodeLabels", {})}
    wanted = {key: value for key, value in spec.get("nodeSelector", {}).items() if key in keys}
    tolerated = {each["key"] for each in spec.get("tolerations", [])}
    for entry in GROUP["flavors"]:
        flavor = flavors[entry["name"]]
        taints = {taint["key"] for taint in flavor.get("nodeTaints", [])}
        if wanted.items() <= flavor.get("nodeLabels", {}).items() and taints <= tolerated:
            return entry["name"]
    raise AssertionError(f"no flavor for {child['metadata']['name']}")


def test_job_of_the_queue_fits_its_quotas(queued):
    job, workloads = queued
    assert not find_problems(job)
    used = {entry["name"]: Counter() for entry in GROUP["flavors"]}
    for child in workloads:
        used[choose_flavor(child)] += read_requests(child)
    for entry in GROUP["flavors"]:
        quotas = {each["name"]: read_quantity(each["nominalQuota"]) for each in entry["resources"]}
        assert list(quotas) == GROUP["coveredResources"]
        assert set(used[entry["name"]]) <= set(quotas), "Kueue admits no Pod with a resource that is not covered"
        assert all(used[entry["name"]][name] <= quota for name, quota in quotas.items())
    assert used["h100"]["nvidia.com/gpu"] == 8
    assert used["cpus"]["cpu"] > 0


def test_job_of_the_queue_is_in_the_queue_of_its_namespace(queued):
    job, workloads = queued
    assert LOCAL_QUEUE["metadata"] == {"name": job.spec.scheduling.queue, "namespace": job.metadata.namespace}
    assert LOCAL_QUEUE["spec"]["clusterQueue"] == CLUSTER_QUEUE["metadata"]["name"]
    selected = CLUSTER_QUEUE["spec"]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert selected == job.metadata.namespace
    labels = {child["spec"]["template"]["metadata"]["labels"][LABEL_KUEUE_QUEUE] for child in workloads}
    assert labels == {job.spec.scheduling.queue}


@pytest.mark.parametrize(
    "part", read_objects("trackers.md", None), ids=lambda part: next(iter(part["spec"]["tracking"]))
)
def test_part_about_a_tracker_reaches_the_head(part):
    job = make_job(**part["spec"])
    assert not find_problems(job)
    [head] = (
        child["spec"]["template"]["spec"]
        for child in build_children(job, "token", DEFAULTS)
        if child["metadata"]["name"] == "gsm8k-head" and child["kind"] == "Job"
    )
    [container] = head["containers"]
    names = {each["name"] for each in container["env"]}
    assert names & {"WANDB_API_KEY", "MLFLOW_TRACKING_URI"}


@pytest.mark.parametrize(
    "term", ["rollout", "episode", "group", "advantage", "reconcile", "condition", "lane", "publish", "sync"]
)
def test_glossary_has_the_term_with_a_link(term):
    text = (ROOT / "docs" / "glossary.md").read_text()
    assert re.search(rf"^\| {term} \| .+\]\([\w./-]+\.md(#[\w-]+)?\)\) \|$", text, re.M)


def test_five_measurements_of_the_readme_are_rows_of_all():
    readme = (ROOT / "README.md").read_text().partition("## Measured")[2].partition("\n## ")[0]
    rows = [line for line in readme.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 5
    assert set(rows) <= set((ROOT / "docs" / "measurements.md").read_text().splitlines())
