"""A model with experts on real FSDP2 ranks: one step, what is published, and the export, compared with transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rljob_api.errors import UserError
from rljob_api.run.folder import FILE_JOB, export_folder
from rljob_trainer.policy.export_step import export_checkpoint
from rljob_trainer.run_folder.file_facts import DamagedCheckpointError
from tests.support import export_scenarios, policy_scenarios
from tests.support.rank_programs import run_forked
from tests.support.reference_trainer import ReferenceTrainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_forked(export_scenarios.__name__, tmp_path_factory.mktemp("exports"))


ADAPTER_CONFIG = "adapter/adapter_config.json"


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the file's content; peft writes the modules, which are a set, in any order."""
    config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text())
    return config | {"target_modules": sorted(config["target_modules"])}


def outcome(folder: Path, num_ranks: int) -> dict[str, Any]:
    return torch.load(folder / f"experts-{num_ranks}.pt", weights_only=False)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_step_of_experts_equals_an_independent_computation(num_ranks: int, folder: Path) -> None:
    trainer = ReferenceTrainer(folder / "experts", policy_scenarios.PLAIN)
    loss, _, norm = trainer.gradients(policy_scenarios.build_rows())
    ours = outcome(folder, num_ranks)
    assert ours["metrics"].loss == pytest.approx(loss, abs=1e-5)
    assert ours["metrics"].grad_norm == pytest.approx(norm, abs=1e-5)
    experts = [name for name in ours["weights"] if ".experts." in name]
    assert len(experts) == 4, "two layers, each with gate_up_proj and down_proj"
    assert not any(torch.equal(ours["before"][name], ours["weights"][name]) for name in experts), "they must learn"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_export_of_experts_loads_with_the_trained_weights(num_ranks: int, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    export, ours = folder / f"experts-export-{num_ranks}", outcome(folder, num_ranks)
    files = load_file(export / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in files, "the names are those of checkpoints"
    model = AutoModelForCausalLM.from_pretrained(export)
    loaded = model.state_dict()
    assert loaded.keys() == ours["weights"].keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in ours["weights"].items())
    trained = AutoModelForCausalLM.from_pretrained(folder / "experts" / "model")
    trained.load_state_dict(ours["weights"])
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, trained(tokens).logits)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_published_experts_are_those_of_the_export(num_ranks: int, folder: Path) -> None:
    files = load_file(folder / f"experts-export-{num_ranks}" / "model.safetensors")
    published = outcome(folder, num_ranks)["published"]
    assert published.keys() == files.keys()
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in published, "rollouts need what is not a parameter"
    assert all(torch.equal(published[name], tensor) for name, tensor in files.items())


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["experts", "adapters"])
def test_checkpoint_is_exported_by_one_process_as_its_ranks_export_it(name: str, num_ranks: int, folder: Path) -> None:
    run, expected = folder / f"{name}-run-{num_ranks}", folder / f"{name}-export-{num_ranks}"
    exported = export_folder(run, 1)
    export_checkpoint(run, 1, exported)
    files = {str(path.relative_to(expected)) for path in expected.rglob("*") if path.is_file()}
    assert {str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()} == files
    for file in files - {ADAPTER_CONFIG}:
        assert (exported / file).read_bytes() == (expected / file).read_bytes(), file
    if ADAPTER_CONFIG in files:
        assert read_adapter_config(exported) == read_adapter_config(expected)
    with pytest.raises(UserError, match="has no checkpoint of step 7; it has 1"):
        export_checkpoint(run, 7, folder / "other")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["experts", "adapters"])
def test_ranks_that_have_trained_on_export_an_earlier_checkpoint(name: str, num_ranks: int, folder: Path) -> None:
    earlier, expected = folder / f"{name}-earlier-export-{num_ranks}", folder / f"{name}-export-{num_ranks}"
    files = {str(path.relative_to(expected)) for path in expected.rglob("*") if path.is_file()} - {ADAPTER_CONFIG}
    assert "model.safetensors" in files
    for file in files:
        assert (earlier / file).read_bytes() == (expected / file).read_bytes(), file


def test_a_checkpoint_is_exported_where_its_attention_and_compiler_do_not_run(folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(folder / "experts-run-1", tmp_path / "run", ignore=shutil.ignore_patterns("exports"))
    job = yaml.safe_load((run / FILE_JOB).read_text())
    job["spec"].setdefault("trainer", {}).update({"attention": "flash_attention_2", "compile": "always"})
    (run / FILE_JOB).write_text(yaml.safe_dump(job))
    export_checkpoint(run, 1, tmp_path / "exported")
    ours, theirs = (
        load_file(each / "model.safetensors") for each in (tmp_path / "exported", folder / "experts-export-1")
    )
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_damaged_checkpoint_is_not_exported(folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(folder / "experts-run-2", tmp_path / "run", ignore=shutil.ignore_patterns("exports"))
    shard = next((run / "checkpoints").glob("*/trainer/*.distcp"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(DamagedCheckpointError, match=shard.name):
        export_checkpoint(run, 1, export_folder(run, 1))
    assert not list((run / "exports").iterdir()), "nothing is left"
