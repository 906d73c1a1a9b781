"""What the errors of an import say."""

from __future__ import annotations

import pytest

from rljob_api.errors import UserError
from rljob_service.worker.load.loading import load
from rljob_service.worker.settings import FunctionSettings


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            "raise ImportError('libtorch_cpu.so: failed to map segment from shared object')",
            "more address space than function.maxMemory, 2Gi: raise it, for torch to 16Gi",
        ),
        ("from . import helper", "no known parent package; a file is not a part of a package"),
        ("import not_installed_anywhere", "function.requirements"),
    ],
)
def test_failed_import_names_its_remedy(statement: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        load(FunctionSettings(statement, "reward.py", None, "auto", {}, 2 << 30))
