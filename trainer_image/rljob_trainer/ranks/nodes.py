"""The Ray nodes of a trainer group: which belong to it, and whether it has lost one when a rank has died.

A rank has failed only if its node still exists. Otherwise its Pod was evicted or restarted, which the operator judges:
no end counts twice, and a drain does not count.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray

from rljob_api.wire.contract import RAY_RESOURCE_TRAINER
from rljob_trainer.ranks.ray_node import is_listening

SETTLE_SECONDS = 5.0
"""A Pod that is deleted ends its rank and its raylet at about the same time; either may be noticed first."""
_POLL_SECONDS = 0.5

Node = dict[str, Any]
"""As ray.nodes() describes it."""


def find_trainer_nodes() -> frozenset[str]:
    """Return the ids of the nodes that offer ranks."""
    nodes = (node for node in ray.nodes() if node["Alive"] and RAY_RESOURCE_TRAINER in node["Resources"])
    return frozenset(str(node["NodeID"]) for node in nodes)


async def has_lost_node(members: frozenset[str], settle_seconds: float = SETTLE_SECONDS) -> bool:
    """Whether one of these nodes no longer exists, or disappears within `settle_seconds`."""
    deadline = time.monotonic() + settle_seconds
    while not await asyncio.to_thread(lambda: is_any_lost(members, ray.nodes(), is_raylet_listening)):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True


def is_any_lost(members: frozenset[str], nodes: Iterable[Node], is_listening: Callable[[Node], bool]) -> bool:
    """Ray takes 15 s and more to notice that a raylet was killed, its port only a moment."""
    alive = {str(node["NodeID"]): node for node in nodes if node["Alive"]}
    return any(member not in alive or not is_listening(alive[member]) for member in sorted(members))


def is_raylet_listening(node: Node) -> bool:
    return is_listening(node["NodeManagerAddress"], node["NodeManagerPort"])
