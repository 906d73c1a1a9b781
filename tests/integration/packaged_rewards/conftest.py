"""The unit tests' real reward servers, for rewards whose packages are installed by function.requirements."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_UNIT = Path(__file__).parents[2] / "unit" / "rljob_reward" / "conftest.py"
_spec = importlib.util.spec_from_file_location("reward_servers", _UNIT)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
start_server = _module.start_server
