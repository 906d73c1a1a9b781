"""Modules of a project that is not installed, for sources that import its base classes. Standard library only."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence


def provide_module(name: str, classes: Mapping[str, type]) -> None:
    """Make module `name`, such as project.module, importable with `classes` where it is missing."""
    if not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.append(_Finder(name, classes))  # the last one: an installed module wins


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, name: str, classes: Mapping[str, type]) -> None:
        self.name, self._classes = name, classes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_package = self.name.startswith(f"{name}.")
        return (
            importlib.util.spec_from_loader(name, self, is_package=is_package)
            if is_package or name == self.name
            else None
        )

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == self.name:
            vars(module).update(self._classes)
