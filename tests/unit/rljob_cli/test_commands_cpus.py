"""The data type for CPUs: float32 where bfloat16 has no instructions and the job leaves the choice open."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_cli.check.jobfile import load_partial
from rljob_cli.commands import has_bfloat16, use_float32
from tests.paths import EXAMPLES


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("Features\t: fp asimd bf16", True),
        ("Features\t: fp asimd", False),
        ("processor\t: 0", True),
    ],
)
def test_flags_show_whether_cpus_have_bfloat16(line: str, expected: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: some CPU\n{line}\n")
    assert has_bfloat16(cpuinfo) is expected


def test_a_system_without_cpuinfo_keeps_the_default(tmp_path: Path) -> None:
    assert has_bfloat16(tmp_path / "missing")


def test_open_types_of_cpus_become_float32() -> None:
    job = load_partial(EXAMPLES / "judge/rljob.yaml").job
    assert use_float32(job, {}) == ["spec.trainer.dtype", "spec.rewards[1].judge.model.dtype"]
    assert job.spec.trainer.dtype == "float32"
    assert {model.dtype for model in job.spec.served_models.values()} == {"float32"}
    assert not use_float32(job, {})


@pytest.mark.parametrize(
    ("example", "override"),
    [("quickstart", "spec.trainer.dtype=bfloat16"), ("quickstart", "spec.rollout.gpusPerReplica=1")],
)
def test_a_given_type_and_that_of_gpus_stay(example: str, override: str) -> None:
    job = load_partial(EXAMPLES / example / "rljob.yaml", [override]).job
    assert not use_float32(job, {})
    assert job.spec.trainer.dtype == "bfloat16"


def test_a_model_that_vllm_computes_on_cpus_in_bfloat16_alone_keeps_it() -> None:
    job = load_partial(EXAMPLES / "quickstart/rljob.yaml").job
    assert not use_float32(job, {"architectures": ["Qwen3_5ForConditionalGeneration"]})
    assert job.spec.trainer.dtype == "bfloat16"
