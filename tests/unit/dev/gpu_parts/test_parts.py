"""The archives for a GPU machine without a network: what is packed and unpacked, and what is met of torch."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata

import pytest
import yaml

from dev.gpu_parts import pack, unpack


@pytest.fixture
def site(tmp_path):
    """A folder as an installer leaves it."""
    folder = tmp_path / "site"
    for name, text in {
        "vllm/__init__.py": "x" * 500,
        "vllm/kernel.abi3.so": "machine code " * 3000,
        "vllm/vllm-rs": "a program",
        "psutil/_psutil_linux.abi3.so": "kept: not every .abi3.so is a large kernel",
        "ray/jars/ray.jar": "java",
        "ray/__pycache__/a.pyc": "compiled",
        "bin/ray": "#!",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "vllm/link.so").symlink_to("kernel.abi3.so")
    return folder


def pack_site(site, to, num_bytes):
    to.mkdir(exist_ok=True)
    files = pack.find_files(site, yaml.safe_load(pack.CONTENTS.read_text())["files"])
    return pack.pack(files, site, to, num_bytes, preset=6, block=20_000)


def test_archives_have_their_size_and_unpack_to_what_was_packed(site, tmp_path):
    number, there = pack_site(site, tmp_path / "parts", 100), tmp_path / "there"
    sizes = [path.stat().st_size for path in (tmp_path / "parts").iterdir()]
    assert len(sizes) == number > 2
    assert max(sizes) == 100
    there.mkdir()
    unpack.unpack(tmp_path / "parts", there)
    found = {path.relative_to(there).as_posix() for path in there.rglob("*") if not path.is_dir()}
    assert found == {"vllm/__init__.py", "vllm/kernel.abi3.so", "vllm/link.so", "psutil/_psutil_linux.abi3.so"}
    assert (there / "vllm/link.so").read_text() == (site / "vllm/kernel.abi3.so").read_text()


def test_archives_of_an_earlier_call_do_not_stay(site, tmp_path):
    many = pack_site(site, tmp_path / "parts", 100)
    assert pack_site(site, tmp_path / "parts", 10_000) == 1 < many
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["parts.tar.xz.1"]


@pytest.mark.parametrize("lost", [1, 2, None])
def test_an_archive_that_did_not_arrive_is_named(site, tmp_path, lost):
    parts = tmp_path / "parts"
    pack_site(site, parts, 100)
    for path in parts.iterdir() if lost is None else [parts / f"parts.tar.xz.{lost}"]:
        path.unlink()
    with pytest.raises(SystemExit, match=rf"lacks parts\.tar\.xz\.{lost or 1}, which"):
        unpack.unpack(parts, tmp_path)


def test_torch_and_what_the_machine_has_are_not_packed():
    patterns = yaml.safe_load(pack.CONTENTS.read_text())["packages"]
    locked = ["torch==2.13.0", "nvidia-cublas==13.1 ; sys_platform == 'linux'", "mlflow-skinny==3.4"]
    locked += ["ray[default]==2.60.0", "scipy==1.17", "typing-extensions==4.15", "torch-c-dlpack-ext==0.1.5"]
    locked += ["nvidia-ml-py==13.6"]
    assert list(pack.choose(locked, patterns, "scipy,typing_extensions")) == [
        "ray[default]==2.60.0",
        "torch-c-dlpack-ext==0.1.5",
        "nvidia-ml-py==13.6",
    ]


def test_packages_of_the_checkout_have_their_entry_points_and_programs(tmp_path):
    site, programs = tmp_path / "site", tmp_path / "bin"
    site.mkdir()
    programs.mkdir()
    unpack.add_checkout(site, programs / "python")
    found = {each.metadata["Name"]: each for each in metadata.distributions(path=[str(site)])}
    plugins = found["rljob-trainer"].entry_points.select(group="vllm.general_plugins")
    assert [each.value for each in plugins] == ["rljob_trainer.rollout.plugin:register"]
    assert (programs / "rljob").read_text().startswith(f"#!{programs}/python\n")
    lines = (site / "rljob.pth").read_text().splitlines()
    assert (lines[0], str(unpack.ROOT / "trainer_image") in lines) == ("import torch_lacks", True)


def test_what_an_older_torch_lacks_is_added_when_the_module_is_imported(tmp_path, monkeypatch):
    for name, text in {
        "__init__": "",
        "checkpoint": "",
        "varlen": "def varlen_attn(query, scale=None):\n    return query, scale\n",
        "newer": "def varlen_attn(query, enable_gqa=False):\n    return query, enable_gqa\n",
    }.items():
        path = tmp_path / "oldtorch" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    lacks = importlib.import_module("dev.gpu_parts.torch_lacks")
    add, accept = lacks.MET["torch.utils.checkpoint"], lacks.MET["torch.nn.attention.varlen"]
    monkeypatch.setattr(lacks, "MET", {"oldtorch.checkpoint": add, "oldtorch.varlen": accept, "oldtorch.newer": accept})
    importlib.reload(importlib.import_module("oldtorch"))
    assert importlib.import_module("oldtorch.checkpoint")._RECOMPUTE is not None
    assert importlib.import_module("oldtorch.varlen").varlen_attn(1, scale=2, enable_gqa=True) == (1, 2)
    assert importlib.import_module("oldtorch.newer").varlen_attn(1, enable_gqa=True) == (1, True)
