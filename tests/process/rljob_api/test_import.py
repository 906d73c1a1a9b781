from __future__ import annotations

import subprocess
import sys

from tests.support.waiting import DEADLINE_SECONDS


def test_errors_are_imported_without_pydantic():
    code = "import sys, rljob_api.errors; print('pydantic' in sys.modules, 'yaml' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS
    )
    assert found.stdout.split() == ["False", "False"]
