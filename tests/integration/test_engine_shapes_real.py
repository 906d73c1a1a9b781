"""vLLM's models with one tensor-parallel worker and two: the digest after two updates is the publisher's, and again
after a sleep.

The updates are those of rollouts, on models that start with placeholders. One program loads all shapes
(tests/support/engine_program.py), since importing vLLM takes most of the time.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_trainer.weights.checksum import Digest
from tests.support import engine_program
from tests.support.rank_programs import run_program

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_program(engine_program.__name__, tmp_path_factory.mktemp("shapes"))


def digest(folder: Path, case: str, num_workers: int) -> str:
    """Return the digest after two updates, which must be the one after a sleep."""
    files = [folder / f"digests-{num_workers}-{rank}.json" for rank in range(num_workers)]
    parts = [json.loads(file.read_text())[case].split() for file in files]
    updated, woken = (str(sum(map(Digest.parse, digests), start=Digest())) for digests in zip(*parts, strict=True))
    assert woken == updated, "the load after a sleep gives other weights"
    return updated


def expected(folder: Path, case: str) -> str:
    return json.loads((folder / "expected.json").read_text())[case]["digest"]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("case", engine_program.CASES)
def test_digest_of_the_engine_is_that_of_the_publisher(folder: Path, case: str, num_workers: int) -> None:
    assert digest(folder, case, num_workers) == expected(folder, case)


def test_digest_of_dense_models_is_of_words(folder: Path) -> None:
    units = {case: each["unit"] for case, each in json.loads((folder / "expected.json").read_text()).items()}
    others = {case for case in units if case.startswith(("experts", "states"))}
    assert {case for case, unit in units.items() if unit == "element"} == others


@pytest.mark.parametrize("num_workers", [1, 2])
def test_parameter_that_no_update_replaces_changes_the_digest(folder: Path, num_workers: int) -> None:
    assert digest(folder, engine_program.MISSING, num_workers) != expected(folder, engine_program.MISSING)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_start_from_the_checkpoint_gives_the_same_digest(folder: Path, num_workers: int) -> None:
    assert digest(folder, engine_program.CHECKPOINT, num_workers) == expected(folder, "tied")
