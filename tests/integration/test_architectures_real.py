"""What trains is what is served, for each tested architecture, on tiny random models.

The policy against transformers' whole model, what is published against what vLLM's model holds, and the export in
transformers and in vLLM, with adapters, too. `make test` has one architecture of each kind, `make test-models` all; the
latter prints the table. One program runs them (tests/support/architecture_program.py): imports take most of the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_inputs.models.architectures import read_table
from tests.paths import ROOT
from tests.support.tiny_models import MODELS, REPRESENTATIVES, class_name

pytestmark = pytest.mark.real

EXACT = 1e-5
"""Tolerance of log-probs in fp32: the policy and transformers."""
SERVED = {"any": 1e-4, "bfloat16": 0.1}
"""Tolerance of the mean difference of log-probs between vLLM and transformers in fp32, by the data type in which vLLM
computes on CPUs. In bfloat16, a token may get another expert."""
PROGRAM = "tests.support.architecture_program"
"""It sets the environment of vLLM, so nothing imports it."""
SECONDS = 400
"""For one architecture, on a busy machine: 10 s on a quiet one."""
RARE = [pytest.mark.nightly, pytest.mark.slow]
"""make test leaves out what is slow, and make test-slow what is nightly."""
ALL = [pytest.param(name, marks=[] if name in REPRESENTATIVES else RARE, id=name) for name in MODELS]

Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Outcome]]:
    """Returns what the program found out. It runs once for the representatives, and once for all others."""
    folder = tmp_path_factory.mktemp("architectures")

    def read(name: str) -> Outcome:
        if not (folder / f"{name}.json").exists():
            is_common = name in REPRESENTATIVES
            run([each for each in MODELS if (each in REPRESENTATIVES) is is_common], folder)
        outcome: Outcome = json.loads((folder / f"{name}.json").read_text())
        assert "error" not in outcome, outcome["error"]
        return outcome

    yield read
    if found := {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}:
        print("\n" + describe(found))


def run(names: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", PROGRAM, str(folder), *names]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS * len(names), check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def describe(outcomes: dict[str, Outcome]) -> str:
    """Return the table for people: differences of log-probs, and published of all tensors."""
    header = ("architecture", "attention", "policy", "published", "vLLM's class", "export", "adapters", "check")
    rows = [header]
    for name, found in outcomes.items():
        published = f"{found.get('num_published', '-')}/{found.get('num_tensors', '-')}"
        differences = [found.get(key) for key in ("logprobs", "served_mean", "adapted_mean", "checked")]
        policy, served, adapted, checked = ("-" if value is None else f"{value:.0e}" for value in differences)
        if served == "-":
            served = MODELS[name].why
        rows.append(
            (name, found.get("attention", "-"), policy, published, found.get("class", "-"), served, adapted, checked)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


@pytest.mark.parametrize("name", ALL)
def test_policy_computes_what_transformers_computes(outcomes: Callable[[str], Outcome], name: str) -> None:
    assert outcomes(name)["logprobs"] < EXACT


@pytest.mark.parametrize("name", ALL)
def test_vllm_holds_what_is_published(outcomes: Callable[[str], Outcome], name: str) -> None:
    found = outcomes(name)
    assert found["num_published"] > 10
    if found["other_types"]:  # of this CPU's fp32; a job in bfloat16 has the same in both
        assert MODELS[name].on_cpus == "bfloat16", found["other_types"]
    else:
        assert found["held"] == found["published"]


@pytest.mark.parametrize("name", ALL)
def test_export_has_every_tensor_of_the_source_and_changes_those_that_are_trained(
    outcomes: Callable[[str], Outcome], name: str
) -> None:
    found = outcomes(name)
    assert found["names"] == [], "tensors that only the source or only the export has"
    assert found["kept"] == [], "tensors that are not trained, and differ"
    assert 0 < found["changed"] <= found["num_published"]


@pytest.mark.parametrize("name", ALL)
def test_headers_of_the_files_count_what_is_trained(outcomes: Callable[[str], Outcome], name: str) -> None:
    assert outcomes(name)["lacking"] == []
    # Some files have single numbers that are buffers in transformers.
    assert outcomes(name)["num_planned"] == pytest.approx(outcomes(name)["num_parameters"], rel=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_export_is_served_as_transformers_computes_it(outcomes: Callable[[str], Outcome], name: str) -> None:
    if MODELS[name].on_cpus == "none":
        pytest.skip(MODELS[name].why)
    assert outcomes(name)["served_mean"] < SERVED[MODELS[name].on_cpus]


@pytest.mark.parametrize("name", ALL)
def test_the_check_before_the_first_step_raises_no_alarm(outcomes: Callable[[str], Outcome], name: str) -> None:
    if MODELS[name].on_cpus == "none":
        pytest.skip(MODELS[name].why)
    assert outcomes(name)["checked"] <= outcomes(name)["checked_limit"]


@pytest.mark.parametrize("name", ALL)
def test_adapters_are_served_as_the_merged_export_computes_them(outcomes: Callable[[str], Outcome], name: str) -> None:
    if MODELS[name].on_cpus == "none" or read_table().by_name[class_name(name)].adapters != "any":
        pytest.skip("vLLM adds no adapters to it on CPUs")
    found = outcomes(name)
    assert found["adapters_effect"] > 2 * SERVED[MODELS[name].on_cpus], (
        "the adapters change nothing: this shows nothing"
    )
    assert found["adapted_difference"] < SERVED[MODELS[name].on_cpus]
