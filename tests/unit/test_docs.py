"""The documents name links, make targets, fields and files that exist; their jobs, whole or in part, are valid."""

import ast
import re
from functools import cache

import pytest
import yaml

from rljob_api.generate.crd import build_object_schema
from rljob_api.manifest.job import RLJob
from rljob_api.read.load import load_manifests
from rljob_core.children import build_children
from rljob_core.defaults import DEFAULTS
from rljob_core.plan.validate import find_problems
from tests.paths import ROOT
from tests.support.job_simulation import make_job
from tests.support.plugins import KNOWN

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")
CODE_BLOCK = re.compile(r"^ *```.*?^ *```$", re.S | re.M)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    links = [link for link in LINK.findall(document.read_text()) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing, f"{document.relative_to(ROOT)} links to {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_anchors_of_links_are_headings(document):
    links = [(name, anchor) for name, anchor in ANCHOR.findall(document.read_text()) if "://" not in name]
    pages = {name: (document.parent / name).resolve() if name else document for name, _ in links}
    missing = [
        f"{name}#{anchor}"
        for name, anchor in links
        if pages[name].suffix == ".md" and anchor not in list_anchors(pages[name])
    ]
    assert not missing, f"{document.relative_to(ROOT)} links to {missing}"


@cache
def list_anchors(page):
    """Return the anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", page.read_text()), re.M)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_that_are_named_exist(document):
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([a-z0-9-]+)`", document.read_text()))
    missing = [
        target for target in named if not re.search(rf"^(?:[a-z0-9 -]* )?{target}(?: [a-z0-9 -]*)?:", makefile, re.M)
    ]
    assert not missing, f"{document.relative_to(ROOT)} names {missing}"


def test_the_smallest_job_of_the_readme_is_valid():
    text = (ROOT / "README.md").read_text()
    example = re.search(r"```yaml\n(apiVersion.*?)```", text, re.S)
    assert example, "the README shows the smallest job"
    (job,) = load_manifests(example[1], "README.md")
    assert job.metadata.name == "gsm8k"


COMING_FROM = ROOT / "docs" / "coming-from.md"
PARTS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", COMING_FROM.read_text(), re.S)]


@pytest.mark.parametrize(
    "part", PARTS, ids=lambda part: "-".join([*part, *(r["name"] for r in part.get("rewards", []))])
)
def test_each_part_of_a_job_that_newcomers_are_shown_is_valid(part):
    smallest = {
        "model": {"source": "/model"},
        "data": {"train": {"source": "/data/train.jsonl"}},
        "rewards": [{"name": "r", "http": {"url": "http://r"}}],
    }
    manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}}
    job = RLJob.model_validate({**manifest, "spec": {**smallest, **part}})
    for reward in job.spec.rewards:
        if reward.function and reward.function.inline:
            ast.parse(reward.function.inline)


GPU_YAML = [
    yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "gpus.md").read_text(), re.S)
]
GPU_PARTS = [part for part in GPU_YAML if "kind" not in part]


@pytest.mark.parametrize("part", GPU_PARTS, ids=lambda part: "-".join(part))
def test_each_part_of_a_job_on_gpus_has_pods_that_the_api_server_takes(part):
    job = make_job(**part)
    assert find_problems(job) == []
    for role in ("trainer", "rollout"):
        if role in part:
            [limits] = (c["resources"]["limits"] for c in build_containers(job, role))
            pool = part[role].get("nodePool", {})
            assert limits[pool.get("gpuResource", "nvidia.com/gpu")] == str(part[role]["gpusPerReplica"])


def test_doctors_pod_asks_for_the_gpus_that_the_doctor_expects():
    [doctor] = (part for part in GPU_YAML if part.get("kind") == "Job")
    [container] = doctor["spec"]["template"]["spec"]["containers"]
    assert container["command"][:3] == ["python", "-m", "rljob_trainer.doctor"]
    assert container["command"][3:] == ["--gpus", str(container["resources"]["limits"]["nvidia.com/gpu"])]


def build_containers(job, role):
    [spec] = (
        child["spec"]["template"]["spec"]
        for child in build_children(job, "token", DEFAULTS)
        if child["metadata"]["name"] == f"gsm8k-{role}" and "template" in child.get("spec", {})
    )
    return spec["containers"]


def test_recipe_for_rdma_reaches_the_trainers_container():
    [part] = (part for part in GPU_PARTS if "env" in part["trainer"])
    [container] = build_containers(make_job(**part), "trainer")
    assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == "1"
    added = {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert container["securityContext"]["capabilities"] == added
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert part["trainer"]["env"].items() <= env.items()
    described = (ROOT / "docs" / "gpus.md").read_text()
    assert all(f"| `{name}`" in described for name in part["trainer"]["env"]), "each variable has its reason"


@pytest.mark.parametrize("header", ["| here | verl | TRL (`GRPOConfig`) | OpenRLHF |", "| here | slime | prime-rl |"])
def test_settings_of_the_guide_for_newcomers_are_fields(header):
    table = COMING_FROM.read_text().partition(header)[2].partition("\n\n")[0]
    settings = re.findall(r"^\| `(?!rljob )([A-Za-z0-9.\[\]]+)", table, re.M)
    known = set(list_fields(build_object_schema(RLJob)["properties"]["spec"]))
    assert len(settings) > 30
    assert sorted(set(settings) - known) == []


def list_fields(node, path=""):
    """Yield the paths of the fields of a schema."""
    for name, field in node.get("properties", {}).items():
        yield path + name
        yield from list_fields(field.get("items", field), f"{path}{name}{'[]' if 'items' in field else ''}.")


WALKS = re.findall(
    r"^\| (.*?) \| `(\w+)/` → `([\w/]+)/` → `(\w+\.py)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M
)


def test_contributing_shows_ten_walks():
    assert len(WALKS) == 10


@pytest.mark.parametrize(("task", "package", "folder", "file"), WALKS)
def test_walk_of_contributing_leads_to_a_file(task, package, folder, file):
    assert len(list((ROOT / package).glob(f"rljob_*/{folder}/{file}"))) == 1, task


RECIPES = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add")[2].partition("\n## ")[0]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", RECIPES))))
def test_file_of_a_recipe_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("symbol", "path"), re.findall(r"`([A-Za-z_][\w.]*)` (?:in|of)\s+`([\w/]+\.py)`", RECIPES))
def test_symbol_of_a_recipe_is_defined_in_its_file(symbol, path):
    scope = ast.parse((ROOT / path).read_text())
    for name in symbol.split("."):
        found = [node for node in scope.body if name in names_of(node)]
        assert found, f"{path} has no {name}"
        scope = found[0]


def names_of(node):
    """Return what a statement defines."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return {getattr(node, "name", None), *(target.id for target in targets if isinstance(target, ast.Name))}


def test_the_guide_to_rewards_lists_every_form_of_the_table():
    text = (ROOT / "docs" / "rewards.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    missing = [
        c.form for c in KNOWN.conventions if not any(f"`{c.form}`" in r and f"| `{c.name}` |" in r for r in rows)
    ]
    assert sorted(set(missing)) == []
