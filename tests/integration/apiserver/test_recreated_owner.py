"""A job or RewardModel that is recreated with the name of a deleted one whose children were not garbage-collected.

No garbage collector runs here, so only the operator deletes the children of the earlier owner. The test finishes
foreground deletions, as a collector does for objects without dependents.
"""

from __future__ import annotations

import pytest

from rljob_api.wire.contract import LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY
from tests.integration.apiserver.admin_client import CHILD_KINDS
from tests.integration.apiserver.manifests import smallest
from tests.integration.apiserver.operator_harness import Manifest, OperatorHarness

NAMES = {"RLJob": "again", "RewardModel": "judge"}
NUM_CHILDREN = {"RLJob": 14, "RewardModel": 5}
NUM_WITHOUT_CONFIG = 9
"""While another owner's object has the ConfigMap's name, neither it nor the workloads are created."""
FOREGROUND = "foregroundDeletion"


def owner_uid(child: Manifest) -> str:
    return next((ref["uid"] for ref in child["metadata"].get("ownerReferences") or []), "")


async def list_children(harness: OperatorHarness) -> list[Manifest]:
    """List the children, and finish the foreground deletions among them."""
    children = await harness.list(*CHILD_KINDS)
    for child in children:
        if FOREGROUND in (child["metadata"].get("finalizers") or []):
            await harness.patch(child["kind"], child["metadata"]["name"], {"metadata": {"finalizers": None}})
    return children


async def create_owner(harness: OperatorHarness, kind: str, num_children: int) -> str:
    """Create an owner and wait for its children. Return its uid."""
    uid = str((await harness.create(smallest(kind, NAMES[kind])))["metadata"]["uid"])

    async def has_children() -> bool:
        children = await list_children(harness)
        return sum(owner_uid(child) == uid for child in children) == num_children

    await harness.until(f"the children of {kind} {uid}", has_children)
    return uid


@pytest.mark.parametrize("kind", NAMES)
async def test_recreated_owner_gets_new_children_when_garbage_collection_lags(harness, kind):
    await harness.start()
    await create_owner(harness, kind, NUM_CHILDREN[kind])
    await harness.delete(kind, NAMES[kind])
    uid = await create_owner(harness, kind, NUM_CHILDREN[kind])
    assert {owner_uid(child) for child in await list_children(harness)} == {uid}, "none of the earlier owner is left"


async def test_foreign_object_stays_while_children_of_the_earlier_job_are_deleted(harness):
    labels = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_JOB: NAMES["RLJob"]}
    metadata = {"name": f"{NAMES['RLJob']}-config", "labels": labels}
    await harness.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"whose": "theirs"}})
    await harness.start()
    await create_owner(harness, "RLJob", NUM_WITHOUT_CONFIG)
    await harness.delete("RLJob", NAMES["RLJob"])
    uid = await create_owner(harness, "RLJob", NUM_WITHOUT_CONFIG)
    children = {owner_uid(child): child for child in await list_children(harness)}
    assert set(children) == {uid, ""}, "none of the earlier job is left"
    assert children[""]["data"] == {"whose": "theirs"}, "neither deleted nor overwritten"
