"""What an episode's process finds in its environment: the model API's addresses and keys, as official clients and
Agent Lightning's agents read them, and the trace that it belongs to.

Where one process plays many episodes, each has variables of its own in a context variable, which os.environ shows to
its tasks and to threads of asyncio.to_thread. Invariant: no episode finds the key of another.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Self

from rljob_service.worker import trace_context
from rljob_service.worker.episodes.types import Access

_OWN: ContextVar[dict[str, str] | None] = ContextVar("rljob_variables", default=None)
"""The variables of the episode whose code runs."""


def build_variables(access: Access) -> dict[str, str]:
    traceparent = trace_context.current()
    return {
        **({trace_context.VARIABLE: traceparent} if traceparent else {}),
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_BASE": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "ANTHROPIC_BASE_URL": access.url,
        "ANTHROPIC_API_KEY": access.api_key,
        "AGL_OPENAI_BASE_URL": access.base_url,
        "AGL_KEY": access.api_key,
        "AGL_EVENT_URL": f"{access.base_url}/rewards",
    }


@contextlib.contextmanager
def set_variables(access: Access) -> Iterator[None]:
    """Set the variables of an episode, and restore the earlier ones: no episode finds the key of another."""
    added = build_variables(access)
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def share_environment() -> None:
    """Let os.environ show each episode its own variables. Before user code is imported."""
    if not isinstance(os.environ, SharedEnvironment):
        shared = SharedEnvironment(os.environ)
        vars(os)["environ"] = shared  # os.getenv reads it, too


@contextlib.contextmanager
def use_variables(access: Access) -> Iterator[None]:
    """Give the variables of an episode to the current task, and to what it starts. See share_environment."""
    token = _OWN.set(build_variables(access))
    try:
        yield
    finally:
        _OWN.reset(token)


class SharedEnvironment(MutableMapping[str, str]):
    """The environment of the process, with the variables of the current episode over it. What an episode sets under
    one of their names is its own; all other names are of the process."""

    def __init__(self, process: MutableMapping[str, str]) -> None:
        self._process = process

    def __getitem__(self, name: str) -> str:
        own = _OWN.get()
        return own[name] if own is not None and name in own else self._process[name]

    def __setitem__(self, name: str, value: str) -> None:
        own = _OWN.get()
        if own is not None and name in own:
            own[name] = value
        else:
            self._process[name] = value

    def __delitem__(self, name: str) -> None:
        own = _OWN.get()
        if own is not None and name in own:
            del own[name]
        else:
            del self._process[name]

    def __iter__(self) -> Iterator[str]:
        yield from {**self._process, **(_OWN.get() or {})}

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> dict[str, str]:
        return dict(self)

    def __or__(self, other: Mapping[str, str]) -> dict[str, str]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, str]) -> dict[str, str]:
        return {**other, **self}

    def __ior__(self, other: Mapping[str, str]) -> Self:
        # Without it, `os.environ |= ...` would put a dict with the key of this episode in its place, for all.
        self.update(other)
        return self

    def __repr__(self) -> str:
        return f"environ({dict(self)!r})"
