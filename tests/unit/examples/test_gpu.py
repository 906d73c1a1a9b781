"""The jobs of examples/gpu are valid, fit the GPUs that they name, and have the Pods that their README shows."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from memory_plan.cases import QWEN25_1B5, QWEN25_7B, QWEN25_32B
from typer.testing import CliRunner

from rljob_api.read.load import load_job
from rljob_cli.main import app
from tests.paths import EXAMPLES, ROOT
from tests.support.model_folder import write_model

README = EXAMPLES / "gpu" / "README.md"
CONFIGS = {
    "one-24gib": QWEN25_1B5,
    "one": QWEN25_1B5,
    "1.5b": QWEN25_1B5,
    "7b-node": QWEN25_7B,
    "7b": QWEN25_7B,
    "32b-node": QWEN25_32B,
    "32b": QWEN25_32B,
}
SMALLEST = {"one-24gib": "rtx-4090", "one": "rtx-6000-ada"}
"""The GPU of a job that does not need 80 GB."""
SHARING = (*SMALLEST, "32b-node")
"""Trainer and rollouts have the same GPUs."""
ROW = {"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"}
BLOCK = re.compile(r"```\n\$ rljob (plan examples/gpu/(.*?)\.yaml .*)\n(?:[^`]*)```")
FOUR_GPUS = ("--set spec.trainer.gpusPerReplica=2", "--set spec.rollout.replicas=2")

each_size = pytest.mark.parametrize("size", CONFIGS)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")


def use_local(size: str, folder: Path) -> list[str]:
    """Return the options that read the model's shape and two rows from this machine instead of the Hub."""
    source = load_job(EXAMPLES / "gpu" / f"{size}.yaml").spec.model.source
    model = folder / source.rpartition("/")[2]
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIGS[size]))
    rows = folder / "rows.jsonl"
    rows.write_text(2 * (json.dumps(ROW) + "\n"))
    changes = [f"data.{name}.{change}" for name in ("train", "eval") for change in (f"source={rows}", "subset=null")]
    changes += [] if source.startswith("pvc://") else [f"model.source={model}"]
    return [part for change in changes for part in ("--set", f"spec.{change}")]


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def plan(size: str, folder: Path, *options: str) -> dict[tuple[str, str], Any]:
    """Return what each role needs of its GPUs and of its Pods."""
    given = ["--gpu", SMALLEST.get(size, "h100-80gb"), "--volume", f"models={folder}", "-o", "json"]
    output = run("plan", f"examples/gpu/{size}.yaml", *given, *use_local(size, folder), *options)
    [file] = json.loads(output)["files"]
    return {(need["role"], need["resource"]): need for need in file["needs"]}


@each_size
def test_it_fits_its_gpus_and_the_memory_of_its_pods(size: str, tmp_path: Path) -> None:
    needs = {key: need["fits"] for key, need in plan(size, tmp_path).items() if key[0] in ("trainer", "rollout")}
    fits = {(role, resource): True for role in ("trainer", "rollout") for resource in ("gpu", "host")}
    if size in SHARING:
        del fits["rollout", "host"]  # the trainer's Pod
    assert needs == fits


def test_smallest_fits_four_gpus_with_the_options_that_its_header_names(tmp_path: Path) -> None:
    assert " ".join(FOUR_GPUS) in (EXAMPLES / "gpu" / "1.5b.yaml").read_text().partition("apiVersion")[0]
    needs = plan("1.5b", tmp_path, *" ".join(FOUR_GPUS).split())
    found = [(needs[role, "gpu"]["count"], needs[role, "gpu"]["fits"]) for role in ("trainer", "rollout")]
    assert found == [(2, True), (2, True)]


@each_size
def test_plan_in_the_readme_is_what_the_command_prints(size: str, tmp_path: Path, golden: Any) -> None:
    text = README.read_text()
    [block] = (found for found in BLOCK.finditer(text) if found[2] == size)
    output = run(*shlex.split(block[1].replace("=DIR", f"={tmp_path}")), *use_local(size, tmp_path))
    lines = "\n".join(line.rstrip() for line in output.splitlines())
    golden(README, text.replace(block[0], f"```\n$ rljob {block[1]}\n{lines}\n```"))


DOCS = ROOT / "docs" / "gpus.md"
ROW_OF_PLANS = re.compile(r"\| `(\S+)` \| (\S+) \| (\S+)\.yaml \| .*")


@pytest.mark.parametrize("row", ROW_OF_PLANS.findall(DOCS.read_text()), ids="-".join)
def test_phases_in_the_docs_are_what_the_command_finds(row: tuple[str, str, str], tmp_path: Path, golden: Any) -> None:
    gpu, _, size = row
    output = CliRunner().invoke(
        app, ["plan", f"examples/gpu/{size}.yaml", "--gpu", gpu, "-o", "json", *use_local(size, tmp_path)]
    )
    [file] = json.loads(output.stdout)["files"]
    need = next(each for each in file["needs"] if (each["role"], each["resource"]) == ("trainer", "gpu"))
    phases = {moment["name"]: f"{moment['bytes'] / 2**30:.1f}" for moment in need["moments"]}
    cells = [f"`{gpu}`", f"{need['available_bytes'] / 2**30:.1f}", f"{size}.yaml"]
    cells += [*(phases[name] for name in ("generate", "update", "publish")), "yes" if need["fits"] else "no"]
    text = DOCS.read_text()
    [line] = (found[0] for found in ROW_OF_PLANS.finditer(text) if (found[1], found[3]) == (gpu, size))
    golden(DOCS, text.replace(line, f"| {' | '.join(cells)} |"))


@each_size
def test_it_is_valid_with_a_model_of_its_family(size: str, tmp_path: Path) -> None:
    local = use_local(size, tmp_path)
    [model] = (path for path in tmp_path.iterdir() if path.is_dir())
    write_model(model, {"max_position_embeddings": 32768})
    output = run("validate", f"examples/gpu/{size}.yaml", "--volume", f"models={tmp_path}", *local)
    assert f"rljob submit examples/gpu/{size}.yaml" in output


@each_size
def test_its_pods_request_the_gpus_of_the_readmes_table(size: str) -> None:
    pods = {}
    for child in yaml.safe_load_all(run("validate", "--render", f"examples/gpu/{size}.yaml")):
        if "template" not in child.get("spec", {}):
            continue
        template = child["spec"]["template"]["spec"]
        [container] = template["containers"]
        gpus = int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
        pods[container["name"]] = child["spec"].get("replicas", 1), gpus
        chooses_nodes = "nodeSelector" in template, "tolerations" in template
        has_pool = gpus > 0 and size not in SMALLEST
        assert chooses_nodes == (has_pool, gpus > 0), "what needs no GPU stays away from nodes that have some"
    row = next(line for line in README.read_text().splitlines() if line.startswith(f"| [{size}.yaml]"))
    unit = "GPU" if pods["trainer"] == (1, 1) else "GPUs"
    rollouts = describe(*pods["rollout"]) if size not in SHARING else f"on the same {unit}"
    assert ("rollout" in pods) == (size not in SHARING)
    assert [cell.strip() for cell in row.split("|")[4:6]] == [describe(*pods["trainer"]), rollouts]
    assert pods["head"] == pods["reward"] == (1, 0)


def describe(replicas: int, gpus: int) -> str:
    unit = "GPU" if gpus == 1 else "GPUs"
    return f"{gpus} {unit}" if replicas == 1 else f"{replicas} x {gpus} {unit}"
