"""The condition PoolsIsolated: whether roles that asked for nodes of their own have them. Reads Pods, decides nothing.

A role asks by nodePool.exclusive; two roles ask by nodeSelectors that differ and are both set.
"""

from __future__ import annotations

from itertools import combinations

from rljob_operator.plan.observed_job import RoleView, World

ISOLATED = "NodesNotShared"
SHARED = "NodeShared"


def judge_isolation(world: World) -> tuple[bool, str, str] | None:
    """Whether it holds, reason and message; None when nobody asked, or no Pod of those that did has a node."""
    pairs = [pair for pair in combinations(world.roles, 2) if _asked(*pair)]
    nodes = {role.name: _nodes(role) for role in world.roles}
    if not any(nodes[role.name] for pair in pairs for role in pair):
        return None
    shared = sorted(
        (node, first.name, second.name) for first, second in pairs for node in nodes[first.name] & nodes[second.name]
    )
    if not shared:
        return True, ISOLATED, "no two roles that asked for nodes of their own share one"
    words = [f"node {node} runs both {first} and {second}" for node, first, second in shared[:3]]
    more = [f"and {len(shared) - 3} more"] if len(shared) > 3 else []
    remedy = "; give the roles' nodePool.nodeSelector labels that no node has both of, or set nodePool.exclusive"
    return False, SHARED, "; ".join(words + more) + remedy


def _asked(first: RoleView, second: RoleView) -> bool:
    if first.kind == second.kind:
        return False  # exclusive keeps other roles away, not replicas of the same one
    pools = first.spec.node_pool, second.spec.node_pool
    selectors = [pool.node_selector for pool in pools]
    return any(pool.exclusive for pool in pools) or (all(selectors) and selectors[0] != selectors[1])


def _nodes(role: RoleView) -> set[str]:
    return {
        node
        for pod in role.pods
        if (node := pod.get("spec", {}).get("nodeName"))
        and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
    }
