"""The RLJobPolicy of a namespace, as the API server has it."""

import asyncio

from rljob_api.manifest.policy import POLICY_NAME, RLJobPolicy
from rljob_cli.check.tenant_policy import read_policy
from rljob_cli.cluster.client import connect
from rljob_cli.options import Target
from rljob_cli.output import say
from rljob_core.kube.resources import POLICY


def fetch_policy(target: Target) -> RLJobPolicy | None:
    """Connect, and return the policy; None, with a line on stderr, if there is none that this version reads. Raise
    ClusterError."""

    async def read() -> RLJobPolicy | None:
        async with connect(target) as cluster:
            where, manifest = f"the namespace {cluster.namespace}", await cluster.find(POLICY, POLICY_NAME)
        if manifest is None:
            say(f"{where} has no RLJobPolicy")
            return None
        policy = read_policy(manifest)
        if policy is None:
            say(f"warning: the RLJobPolicy of {where} has fields that this version does not know")
        return policy

    return asyncio.run(read())
