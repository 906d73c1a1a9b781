"""Plugins by entry points: the forms of functions and the environments of other projects that are installed here.

Two groups: `rljob.signatures` names a SignaturePlugin each, `rljob.environments` the module of an adapter each. The CLI
and the server find them. A worker may run in another Python environment, so it gets what they found: references,
MODULE or MODULE:NAME. Standard library only.
"""

import functools
import importlib
from collections.abc import Collection
from typing import Any, Final

from rljob_api.phrases import did_you_mean

SIGNATURES: Final = "rljob.signatures"
ENVIRONMENTS: Final = "rljob.environments"


@functools.cache  # it reads the metadata of each installed distribution: 55 ms next to vLLM
def find_plugins(group: str) -> dict[str, str]:
    """Return the reference of each installed plugin of a group by its name, in the order of the names."""
    import importlib.metadata  # here, since workers do not need it

    found = sorted(importlib.metadata.entry_points(group=group))
    return {each.name: each.value for each in found}


def load_reference(reference: str) -> Any:
    """Return what MODULE or MODULE:NAME names. Whatever its import raises goes to the caller."""
    module, _, name = reference.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if name else loaded


def describe_unknown(name: str, known: Collection[str]) -> str:
    """Return that no plugin has this name, which ones do, and the nearest."""
    remedy = did_you_mean(name, known, "install the package of its plugin")
    return f"{name} is not installed; known are {', '.join(known) or 'none'}; {remedy}"
