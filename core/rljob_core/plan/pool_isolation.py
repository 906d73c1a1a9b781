"""The condition PoolsIsolated: whether roles that require separate nodes have them. Reads Pods, decides nothing.

A role requires it with nodePool.exclusive; two roles require it with different nodeSelectors.
"""

from itertools import combinations

from rljob_core.plan.observed_job import RoleView

ISOLATED = "NodesNotShared"
SHARED = "NodeShared"
_MAX_NODES_NAMED = 3


def evaluate_isolation(roles: tuple[RoleView, ...]) -> tuple[bool, str, str] | None:
    """Whether it holds, reason and message; None if no role requires it, or no Pod of such roles has a node."""
    pairs = [pair for pair in combinations(roles, 2) if _require_isolation(*pair)]
    nodes = {role.name: _nodes(role) for role in roles}
    if not any(nodes[role.name] for pair in pairs for role in pair):
        return None
    shared = sorted(
        (node, first.name, second.name) for first, second in pairs for node in nodes[first.name] & nodes[second.name]
    )
    if not shared:
        return True, ISOLATED, "no two roles that require separate nodes share one"
    named = [f"node {node} runs both {first} and {second}" for node, first, second in shared[:_MAX_NODES_NAMED]]
    more = [f"and {len(shared) - _MAX_NODES_NAMED} more"] if len(shared) > _MAX_NODES_NAMED else []
    remedy = "; give the roles' nodePool.nodeSelector labels that no node has both of, or set nodePool.exclusive"
    return False, SHARED, "; ".join(named + more) + remedy


def _require_isolation(first: RoleView, second: RoleView) -> bool:
    if first.kind == second.kind:
        return False  # exclusive excludes other roles, not replicas of the same role
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
