"""The Ray actor of a rank as the head knows it: its methods by name.

The head imports no torch, which takes seconds and hundreds of MiB: the actor imports `actor` in its own process.
"""

from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorClass

SAVES = "saves"
"""Ray's concurrency group of `wait_for_save`: it waits next to the other methods, which all run in one thread."""
BEATS = "beats"
"""That of what a rank says while it works."""
GROUPS: dict[str, str] = {"wait_for_save": SAVES, "beat": BEATS, "dump_stacks": BEATS, "describe_process": BEATS}
METHODS = (
    "describe", "start", "inspect", "score", "accumulate", "apply", "call", "follow", "publish", "give_weights",
    "withdraw_weights", "save", "export", "free", "restore", "close", *GROUPS,
)  # fmt: skip
"""Those of actor.RankProcess."""


def build_actor() -> ActorClass[Any]:
    """Return the class of the actors."""

    def start(self: Any) -> None:
        from rljob_trainer.ranks.actor import RankProcess

        self.rank = RankProcess()

    def forward(name: str) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any) -> Any:
            return getattr(self.rank, name)(*arguments)

        call.__name__ = name
        return ray.method(concurrency_group=GROUPS[name])(call) if name in GROUPS else call

    methods = {name: forward(name) for name in METHODS}
    build: Any = ray.remote(concurrency_groups={SAVES: 1, BEATS: 1})  # type: ignore[call-overload]  # not in its types
    return build(type("RankProcess", (), {"__init__": start, **methods}))
