"""Situations on other people's clusters, on a real API server: what a user reads at once, a second later, and the cost.

One operator runs for all, and each has a namespace of its own, on an API server of this module; a second one has CRDs
of other versions. The table of what was observed is in tests/data/situations.md: `-s` prints it with seconds and
requests, --update-golden writes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from rljob_api.generate.__main__ import replace_table
from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_core.kube.client import ApiError, KubeApi, connect
from rljob_core.kube.resources import POLICY, REWARD_MODEL, RLJOB
from rljob_operator.watch import informer
from tests.integration.apiserver.manifests import put, smallest
from tests.integration.apiserver.operator_harness import POLL_SECONDS, Manifest, OperatorHarness
from tests.integration.apiserver.situation import Crds, Row, Situation, Stage, apply, check_cost, observe
from tests.integration.apiserver.situations import SITUATIONS
from tests.integration.apiserver.stepped_operator import SteppedOperator
from tests.integration.apiserver.test_upgrade import CRDS
from tests.integration.apiserver.test_version_skew import change_crd
from tests.paths import DATA, ROOT
from tests.support import fast_yaml
from tests.support.waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAGE = DATA / "situations.md"
HEADER = """
| situation | `kubectl apply` | status |
|---|---|---|
"""
PROBES = {"newer": ("mood", "grim")}
"""A field and a value that a job may set once the CRDs of these versions are served."""
MAX_QUOTED = 100
"""Characters of a message. Some repeat their cause for each role."""
ROWS: dict[str, Row] = {}


def keep(crd: Manifest) -> Manifest:
    return crd


async def write_crds(api: KubeApi, crds: Crds) -> None:
    """Install them, or replace that of RLJobs: the others have the operator's version."""
    change = {"same": keep, "newer": change_crd}[crds]
    found = (await api.request("GET", CRDS))["items"]
    versions = {each["metadata"]["name"]: each["metadata"]["resourceVersion"] for each in found}
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        crd = fast_yaml.load(path.read_text())
        name, version = crd["metadata"]["name"], versions.get(crd["metadata"]["name"])
        if crd["spec"]["names"]["kind"] == "RLJob":
            crd = change(crd)
        elif version:
            continue
        if version:
            crd["metadata"]["resourceVersion"] = version
            await api.request("PUT", f"{CRDS}/{name}", body=crd)
        else:
            await api.request("POST", CRDS, body=crd)


async def create_namespace(api: KubeApi, plane: ControlPlane) -> OperatorHarness:
    name = f"situation-{uuid.uuid4().hex[:8]}"
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    await api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": name}})
    await api.request("POST", f"/api/v1/namespaces/{name}/serviceaccounts", body=account)
    return OperatorHarness(api, name, str(plane.kubeconfig))


@contextlib.asynccontextmanager
async def run_stepped(plane: ControlPlane) -> AsyncIterator[SteppedOperator]:
    operator = SteppedOperator(await connect(str(plane.kubeconfig)))
    try:
        await operator.start()
        yield operator
    finally:
        await operator.stop()


class Cluster:
    """An API server, and its operator once it is needed."""

    def __init__(self, api: KubeApi, plane: ControlPlane) -> None:
        self.api, self.plane, self._crds = api, plane, ""
        self._stack = contextlib.AsyncExitStack()
        self._operator: SteppedOperator | None = None

    async def stage(self, crds: Crds) -> Stage:
        """Return a new namespace. Operators begin again after a change of the CRDs."""
        harness = await create_namespace(self.api, self.plane)
        if self._operator is None or crds != self._crds:
            await self.close()
            if crds != "same":
                await self._install(harness, crds)
            self._crds, self._operator = crds, await self._stack.enter_async_context(run_stepped(self.plane))
        harness.tasks = [self._operator.task]
        return Stage(harness, self._operator, self.plane)

    async def close(self) -> None:
        self._operator = None
        await self._stack.aclose()

    async def _install(self, harness: OperatorHarness, crds: Crds) -> None:
        await write_crds(self.api, crds)

        async def are_served() -> bool:
            found, _ = await apply(harness, put(smallest(), *PROBES[crds]), dryRun="All")
            return bool(found)

        await harness.until(f"the {crds} CRDs", are_served)


@pytest.fixture(scope="module")
def own_plane(tmp_path_factory, loopback):
    """An API server of this module. Its operator reconciles all namespaces, so it always had something to do for jobs
    that other tests had left."""
    folder = tmp_path_factory.mktemp("situations")
    with ControlPlane(folder, address=f"{loopback}.7", components=("etcd", "kube-apiserver")) as plane:
        yield plane


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(own_plane) -> AsyncIterator[Cluster]:
    api = await connect(str(own_plane.kubeconfig))
    cluster = Cluster(api, own_plane)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(informer, "_RELIST_SECONDS", 0.2)
        await write_crds(api, "same")
        for resource in (RLJOB, REWARD_MODEL, POLICY):
            await until_status(api, resource.path("default"), 200)
        yield cluster
        await cluster.close()
    await api.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def skewed(tmp_path_factory, loopback) -> AsyncIterator[Cluster]:
    """An API server whose CRDs change."""
    folder = tmp_path_factory.mktemp("skewed")
    with ControlPlane(folder, address=f"{loopback}.9", components=("etcd", "kube-apiserver")) as plane:
        api = await connect(str(plane.kubeconfig))
        cluster = Cluster(api, plane)
        yield cluster
        await cluster.close()
        await api.close()


async def until_status(api: KubeApi, path: str, code: int) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            try:
                await api.request("GET", path)
                found = 200
            except ApiError as error:
                found = error.code
            if found == code:
                return
            await asyncio.sleep(POLL_SECONDS)


def of_crds(*crds: Crds) -> Any:
    found = [each for each in SITUATIONS if each.crds in crds]
    return pytest.mark.parametrize("situation", found, ids=lambda situation: situation.title)


@of_crds("same")
async def test_user_reads_what_is_wrong_and_requests_stop(cluster, situation):
    await check(cluster, situation)


@of_crds("newer")
async def test_user_reads_how_versions_differ_and_requests_stop(skewed, situation):
    await check(skewed, situation)


async def check(cluster: Cluster, situation: Situation) -> None:
    row = await observe(await cluster.stage(situation.crds), situation)
    cost = f"{row.num_requests:3} requests in {row.after_seconds} s, then {row.later}"
    print(f"\n{row.real_seconds:6.2f} s  {cost}  {format_row(row)}")
    if not row.answer:
        check_cost(row)
    ROWS[situation.title] = row


async def test_table_of_the_documentation_is_what_was_observed(golden):
    if missing := [each.title for each in SITUATIONS if each.title not in ROWS]:
        pytest.skip(f"{len(missing)} of {len(SITUATIONS)} situations were not observed")
    table = HEADER + "".join(f"{format_row(ROWS[each.title])}\n" for each in SITUATIONS)
    golden(PAGE, replace_table(PAGE.read_text(), "situations", table))


def format_row(row: Row) -> str:
    situation = row.situation
    cells = [f"[{situation.title}](../../docs/{situation.docs})"]
    if row.answer:
        cells += [quote(row.answer, situation.refused), ""]
    else:
        type_, status, reason = situation.condition
        message, part = row.condition["message"], next(iter(situation.says), "")
        said = f"{type_} is {status}: {reason}" + (f"<br>{quote(message, part)}" if message else "")
        cells += ["accepted", said]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def quote(text: str, part: str) -> str:
    """Return a long text from the clause with this part on."""
    start = text.rfind("; ", 0, text.index(part)) + 1 if len(text) > MAX_QUOTED else 0
    cut = ("… " if start else "") + text[start : start + MAX_QUOTED].strip()
    cut += " …" if start + MAX_QUOTED < len(text) else ""
    return f"`{cut.replace('`', chr(39))}`"
