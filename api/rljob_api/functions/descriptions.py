"""What a loaded entry point is: parameters of a function, methods of a class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

DEFAULT_ENTRYPOINTS: Final = (
    "compute_score", "reward_func", "reward", "reward_fn", "rubric", "reward_funcs",
)  # fmt: skip
"""If function.entrypoint is null, the first of these that the source defines, else its only public function."""

SCORER_METHODS: Final = ("compute_score", "post_process_scores")
"""Methods of a class for scope: sampleThenGroup."""


def find_only_function(names: Iterable[str]) -> str | None:
    """Return the only public name of `names`, which are the functions of a source; None if there are several."""
    public = [name for name in names if not name.startswith("_")]
    return public[0] if len(public) == 1 else None


class Function(NamedTuple):
    """The parameters of a function; of a method without the first one."""

    name: str
    named: tuple[str, ...] = ()
    """Parameters that can be passed by keyword, in order."""
    required: tuple[str, ...] = ()
    positional_only: tuple[str, ...] = ()
    var_positional: str = ""
    """Name of *args; empty if there is none."""
    var_keyword: str = ""
    annotations: Mapping[str, str] = {}
    literals: frozenset[str] = frozenset()
    """Texts in its module."""

    @property
    def is_opaque(self) -> bool:
        """Whether it only forwards its arguments, such as the wrapper of a decorator."""
        return not self.named and not self.positional_only and bool(self.var_positional or self.var_keyword)

    def accepts(self, name: str) -> bool:
        return name in self.named or bool(self.var_keyword)

    def show(self) -> str:
        parts = [*self.positional_only, *self.named]
        parts += [f"*{self.var_positional}"] if self.var_positional else []
        parts += [f"**{self.var_keyword}"] if self.var_keyword else []
        return f"{self.name}({', '.join(parts)})"


class Class(NamedTuple):
    """A class, or one of its instances."""

    name: str
    bases: frozenset[str]
    """Names of all known base classes."""
    methods: Mapping[str, Function]
    is_instance: bool
    rewards: frozenset[str] = frozenset()
    """Methods marked with @reward."""
    constructor: Function | None = None
    """None: unknown, as of compiled classes, or an instance."""


class Several(NamedTuple):
    """A list of entry points, whose scores are summed."""

    name: str
    elements: tuple[Description, ...]


class Other(NamedTuple):
    """Something that cannot be called."""

    name: str
    what: str
    """Its type, such as int."""


Description = Function | Class | Several | Other
