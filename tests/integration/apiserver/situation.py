"""One situation on a cluster of other people: what is done, what the user then reads, and what it costs.

`observe` applies the job as kubectl does, waits for what the status says, and lets ten minutes of the operator's clock
pass. A situation says what must be read; the numbers of requests are compared with the documentation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rljob_api import __version__
from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_core.backend import JobKey
from rljob_core.kube.client import ApiError
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import NAME, Manifest, OperatorHarness
from tests.integration.apiserver.stepped_operator import SteppedOperator

WITHIN_SECONDS = 2.0
"""Time of the operator's clock after which the status must say what is wrong."""
RESYNC_SECONDS = 300.0
"""As in the chart."""
NUM_RESYNCS = 2
RELEASE = "situations"
"""The release of the chart. Its own tests install others."""
Crds = Literal["same", "newer"]


class Stage(NamedTuple):
    """A namespace of a cluster with its operator."""

    harness: OperatorHarness
    operator: SteppedOperator
    plane: ControlPlane

    @property
    def key(self) -> JobKey:
        return JobKey(self.harness.namespace, NAME)

    async def create(self, manifest: Manifest) -> None:
        """Create an object that the operator watches."""
        await self.see(manifest["kind"], await self.harness.create(manifest))

    async def see(self, kind: str, *found: Manifest) -> None:
        for each in found:
            await self.operator.until_current(kind, self.harness.namespace, each)

    async def see_all(self, *kinds: str) -> None:
        """Wait until the operator knows all objects of these kinds as they are."""
        for kind in kinds:
            await self.see(kind, *await self.harness.list(kind))

    def count(self) -> int:
        return self.operator.count(self.harness.namespace)


Arrange = Callable[[Stage], AbstractAsyncContextManager[None]]
Act = Callable[[Stage], Awaitable[None]]


@contextlib.asynccontextmanager
async def as_it_is(stage: Stage) -> AsyncIterator[None]:
    yield


@dataclass(frozen=True)
class Situation:
    """`refused` and `says`: parts of what the API server answers, and of the condition's message."""

    title: str
    docs: str
    """The section that explains it, from docs/."""
    job: Manifest = field(default_factory=dict)
    """Fields of the job below spec, by dotted path."""
    arrange: Arrange = as_it_is
    """The cluster, before the job is applied."""
    acts: Sequence[Act] = ()
    """What controllers and users do once the operator has reconciled the job."""
    refused: str = ""
    condition: tuple[str, str, str] = ("", "", "")
    """Type, status and reason."""
    says: Sequence[str] = ()
    retries: Literal["", "ever later", "steadily"] = ""
    """How the operator tries again: what refuses may be repaired without an event that it watches."""
    check: Act | None = None
    crds: Crds = "same"


@dataclass(frozen=True)
class Row:
    """What was observed. `answer`: of the API server; empty if it accepted the job."""

    situation: Situation
    answer: str
    condition: Manifest = field(default_factory=dict)
    after_seconds: float = 0.0
    """Seconds of the operator's clock from the apply, or the last act, to the condition."""
    real_seconds: float = 0.0
    num_requests: int = 0
    """Until the condition."""
    later: tuple[int, ...] = ()
    """In the time to each of the next resyncs, with its reconcile."""


async def apply(harness: OperatorHarness, manifest: Manifest, **query: str) -> tuple[Manifest, str]:
    """Create an object as kubectl does, with strict validation. Return it, and the API server's refusal."""
    path, options = harness.path(manifest["kind"]), {"fieldValidation": "Strict"} | query
    try:
        return await harness.api.request("POST", path, query=options, body=manifest), ""
    except ApiError as error:
        return {}, error.message


async def observe(stage: Stage, situation: Situation) -> Row:
    """Raises AssertionError where the user would not read what the situation says."""
    async with situation.arrange(stage):
        began, at = time.monotonic(), stage.operator.seconds
        type_, _, reason = situation.condition
        created, answer = await apply(stage.harness, put_all(smallest(), situation.job))
        assert bool(answer) == bool(situation.refused), answer or "the job was accepted"
        assert situation.refused in answer
        if answer:
            return Row(situation, _anonymize(stage, answer))
        await stage.see("RLJob", created)
        await stage.operator.settle()
        for act in situation.acts:
            at = stage.operator.seconds
            await act(stage)
        condition = await _until_condition(stage, situation.condition, at + WITHIN_SECONDS)
        for part in situation.says:
            assert part in condition["message"]
        after, real, num_requests = stage.operator.seconds - at, time.monotonic() - began, stage.count()
        later = [await _count_until_resync(stage) for _ in range(NUM_RESYNCS)]
        if situation.check:
            await situation.check(stage)
        if situation.says and type_ != "Queued":
            await _check_events(stage, reason, situation.says)
        await _delete_job(stage)
    condition = condition | {"message": _anonymize(stage, condition.get("message", ""))}
    return Row(situation, "", condition, after, real, num_requests, tuple(later))


def check_cost(row: Row) -> None:
    """Requests stop, or tries become fewer. A fight with a policy does neither."""
    retries, first, last = row.situation.retries, row.later[0], row.later[-1]
    if retries == "ever later":
        assert 0 < 2 * last < first, f"{row.later} requests: the waits must grow"
    elif retries == "steadily":
        assert 0 < last <= 1.1 * first, f"{row.later} requests: the tries must not become more"
    else:
        assert not any(row.later), f"{row.later} requests although nothing changes"


async def _until_condition(stage: Stage, wanted: tuple[str, str, str], until: float) -> Manifest:
    type_, status, reason = wanted

    async def is_written() -> Any:
        found = await stage.harness.condition(type_)
        if (found.get("status"), found.get("reason")) == (status, reason):
            return found
        await stage.operator.step(until)
        return None

    condition: Manifest = await stage.harness.until(f"{type_} {status}: {reason}", is_written)
    return condition


async def _count_until_resync(stage: Stage) -> int:
    before = stage.count()
    await stage.operator.pass_seconds(RESYNC_SECONDS)
    await stage.operator.requeue(stage.key)
    return stage.count() - before


async def _check_events(stage: Stage, reason: str, says: Sequence[str]) -> None:
    events = await stage.harness.events(reason)
    assert any(all(part in event["message"] for part in says) for event in events), events
    assert {(event["count"], event["type"]) for event in events} == {(1, "Warning")}, "retries do not repeat it"


async def _delete_job(stage: Stage) -> None:
    """So that it is not reconciled while the clock moves for others."""
    await stage.harness.delete("RLJob", NAME)
    await stage.operator.until_forgotten("RLJob", *stage.key)
    await stage.operator.settle()


def _anonymize(stage: Stage, text: str) -> str:
    text = text.replace(stage.harness.namespace, "research").replace(__version__, "0.2.0")
    return text.replace(f"default-{RELEASE}-", "rljob-system-")
