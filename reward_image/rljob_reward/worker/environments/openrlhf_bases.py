"""The base classes of OpenRLHF's agents, for sources that import them where OpenRLHF is missing: its package needs a
GPU stack, which a runner does not. Standard library only.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any, Final

_MODULES: Final = ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")
_BASES: Final = ("AgentInstanceBase", "AgentExecutorBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor")


class _Base:
    """In the place of a base class of OpenRLHF."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states


def provide_base_classes() -> None:
    """Make `openrlhf.utils.agent` importable where OpenRLHF is missing. Called before the source runs."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # the last one: an installed OpenRLHF wins


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_package = name != _MODULES[-1]
        return importlib.util.spec_from_loader(name, self, is_package=is_package) if name in _MODULES else None

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == _MODULES[-1]:
            vars(module).update({name: type(name, (_Base,), {}) for name in _BASES})
