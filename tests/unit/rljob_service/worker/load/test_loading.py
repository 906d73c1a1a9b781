"""What the errors of an import say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rljob_api.errors import UserError
from rljob_service.worker.load.loading import load
from rljob_service.worker.settings import FunctionSettings
from tests.support.plugins import REFERENCES


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            "raise ImportError('libtorch_cpu.so: failed to map segment from shared object')",
            "more address space than function.maxMemory, 2Gi: raise it, for torch to 16Gi",
        ),
        ("from . import helper", "no known parent package; a file is a part of a package as far as"),
        ("import not_installed_anywhere", "function.requirements"),
    ],
)
def test_failed_import_names_its_remedy(statement: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        load(FunctionSettings(statement, "reward.py", None, "auto", {}, 2 << 30))


@pytest.mark.parametrize("has_init", [True, False])
def test_file_of_a_package_is_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_init: bool) -> None:
    """Repositories keep rewards in packages. Without __init__.py, its own folder is one."""
    files = {
        "kit/rewards/math.py": f"from .texts import strip\n{'from ..shared import WORTH' if has_init else 'WORTH = 2'}",
        "kit/rewards/texts.py": "strip = str.strip",
        "kit/shared.py": "WORTH = 2",
        **(dict.fromkeys(("kit/__init__.py", "kit/rewards/__init__.py"), "") if has_init else {}),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own = "\ndef compute_score(solution_str, ground_truth): return WORTH * (strip(solution_str) == ground_truth)\n"
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "kit/rewards/math.py"
    bound = load(FunctionSettings(path.read_text() + own, str(path), None, "auto", {}, 2 << 30, signatures=REFERENCES))
    assert bound.sample is not None
    sample = {"prompt": "", "completion": " 4 ", "ground_truth": "4"}
    assert bound.sample.read(bound.sample.call([sample]), [sample])[0].score == 2
    for name in [name for name in sys.modules if name.partition(".")[0] in ("kit", "rewards")]:
        del sys.modules[name]
