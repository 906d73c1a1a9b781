"""The tree is the architecture: who may import whom, as docs/architecture.md says."""

import ast
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGES = {
    "rljob_api": ROOT / "api",
    "rljob_operator": ROOT / "operator",
    "rljob_reward": ROOT / "reward_image",
    "rljob_trainer": ROOT / "trainer_image",
    "rljob_cli": ROOT / "cli",
}
ALLOWED = {
    "rljob_api": set(),
    "rljob_operator": {"rljob_api"},
    "rljob_reward": {"rljob_api"},
    "rljob_trainer": {"rljob_api"},
    "rljob_cli": {"rljob_api", "rljob_operator"},
}


def imported_modules(package: str) -> dict[str, set[Path]]:
    """Top-level module -> files that import it."""
    found: dict[str, set[Path]] = {}
    for file in (PACKAGES[package] / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(file.relative_to(ROOT))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    found = imported_modules(package)
    for other in set(PACKAGES) - ALLOWED[package] - {package}:
        assert other not in found, f"{package} must not import {other}: {found[other]}"


@pytest.mark.parametrize("package", ["rljob_api", "rljob_operator", "rljob_reward", "rljob_cli"])
def test_only_the_trainer_imports_torch_ray_and_vllm(package):
    heavy = {"torch", "ray", "vllm", "transformers"} & set(imported_modules(package))
    assert not heavy, f"{package} must stay small; it imports {heavy}"


def test_the_api_imports_pydantic_and_yaml_alone():
    import sys

    foreign = set(imported_modules("rljob_api")) - set(sys.stdlib_module_names) - {"rljob_api", "pydantic", "yaml"}
    assert not foreign


def test_ray_stays_in_the_worker_group_and_vllm_in_the_rollout():
    found = imported_modules("rljob_trainer")
    assert {f.name for f in found.get("ray", set())} <= {"trainer_group.py", "rank_actor.py"}
    in_rollout = {"rollout_server.py", "rollout_weights.py", "vllm_plugin.py", "vllm_weights.py"}
    assert {f.name for f in found.get("vllm", set())} <= in_rollout
