"""What the API server was last seen to hold: objects by kind, namespace and name, found again by their job.

Pure; fed by watch events, by answers to writes, and by a LIST of each kind now and then, which alone finds a missed
delete. Invariants: an older resourceVersion never replaces a newer one; a LIST never drops what was written after it.
Objects are kept as compressed JSON and read only when looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rljob_api.wire.contract import LABEL_JOB, LABEL_REWARD_MODEL
from rljob_operator.backend import Manifest
from rljob_operator.kube.resources import BY_KEY, REWARD_MODEL, RLJOB, Resource

MAX_WARNINGS = 5000
"""Events kept in all: a cluster can make any number of them."""
MAX_EARLY_WARNINGS = 500
"""Events kept of what is not known (yet): each kind has a watch of its own, and a Pod's may lag behind the Events'."""


_OWNERS = (RLJOB.kind, REWARD_MODEL.kind)


class ObjectKey(NamedTuple):
    kind: str
    namespace: str
    name: str


class OwnerKey(NamedTuple):
    """An RLJob or a RewardModel, by which its objects are found."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class _Entry:
    version: int
    owner: OwnerKey | None
    data: bytes


class Cache:
    """See above. Only for one event loop: no locks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._writing: dict[ObjectKey, asyncio.Event] = {}
        self._unheard: dict[ObjectKey, float] = {}
        self._kinds: defaultdict[str, dict[ObjectKey, _Entry]] = defaultdict(dict)
        self._owned: defaultdict[OwnerKey, set[ObjectKey]] = defaultdict(set)
        self._gone: dict[ObjectKey, int] = {}
        self._listed: dict[tuple[str, str | None], int] = {}
        self._early: dict[ObjectKey, Manifest] = {}
        self.num_changes = 0
        """So many times has anything changed: a clock that `changed_at` is read by."""
        self._changed: dict[OwnerKey, int] = {}
        self._forgotten = 0

    def is_listed(self, resource: Resource, namespace: str | None) -> bool:
        """Whether a LIST of the kind has been taken in."""
        return (resource.key, namespace) in self._listed

    def upsert(self, kind: str, manifest: Manifest, *, is_listed: bool = False) -> set[OwnerKey]:
        """Take an object in unless something newer is known. Returns whose it is, and whose it was until somebody
        edited its labels; nobody when nothing changed."""
        key, version = _key(kind, manifest), _version(manifest)
        old = self._kinds[kind].get(key)
        known = old.version if old else max(self._gone.get(key, 0), 0 if is_listed else self._listed_at(key))
        if version <= known:
            return set()
        owner = owner_of(kind, manifest)
        if kind == "Event":
            owner = self._owner_of_event(manifest)
            if owner is None:
                self._keep_early(manifest)
                return set()
        if old and old.owner and old.owner != owner:
            self._unlink(old.owner, key)
        self._kinds[kind][key] = _Entry(version, owner, _pack(manifest))
        self._gone.pop(key, None)
        if owner:
            self._owned[owner].add(key)
            self._touch(owner)
        if kind == "Event":
            self._bound_events()
        elif early := self._early.pop(key, None):
            self.upsert("Event", early, is_listed=True)
        return {of for of in (owner, old.owner if old else None) if of}

    @contextlib.contextmanager
    def writing(self, resource: Resource, namespace: str, name: str) -> Iterator[None]:
        """While the answer to a write is awaited: a watch may tell of it first, and would call it news."""
        key = ObjectKey(resource.key, namespace, name)
        done = self._writing[key] = asyncio.Event()
        try:
            yield
        finally:
            done.set()
            if self._writing.get(key) is done:
                del self._writing[key]

    async def wait_written(self, kind: str, manifest: Manifest) -> None:
        """Until no write of ours to this object is under way."""
        if done := self._writing.get(_key(kind, manifest)):
            await done.wait()

    def upsert_own(self, resource: Resource, answer: Manifest) -> None:
        """Take in the answer to a write. A watch must tell of it in time, unless it changed nothing."""
        key = _key(resource.key, answer)
        old = self._kinds[resource.key].get(key)
        self.upsert(resource.key, answer)
        if not resource.is_optional and (old is None or old.version < _version(answer)):
            self._unheard.setdefault(key, self._clock())

    def heard(self, kind: str, manifest: Manifest) -> None:
        """A watch has told of this object."""
        self._unheard.pop(_key(kind, manifest), None)

    def unheard_seconds(self) -> float:
        """For how long the watches have owed us the echo of a write."""
        self._unheard = {key: since for key, since in self._unheard.items() if key in self._kinds[key.kind]}
        return max((self._clock() - since for since in self._unheard.values()), default=0.0)

    def remove(self, kind: str, manifest: Manifest) -> set[OwnerKey]:
        """An object is gone, as of its resourceVersion. Returns whose it was."""
        key, version = _key(kind, manifest), _version(manifest)
        old = self._kinds[kind].get(key)
        if old and old.version > version:
            return set()  # made anew since
        if kind != "Event":
            self._gone[key] = max(version, self._gone.get(key, 0))
        elif (early := self._early.get(about := _about(manifest))) and _key(kind, early) == key:
            del self._early[about]
        return {owner} if (owner := self._drop(key)) else set()

    def replace(
        self, resource: Resource, namespace: str | None, items: Iterable[Manifest], version: str
    ) -> set[OwnerKey]:
        """Take in a LIST of one kind. Returns the owners of what had been missed."""
        kind, at = resource.key, int(version)
        changed, seen = set[OwnerKey](), set()
        if kind == "Event":  # the LIST brings them again
            self._early = {key: e for key, e in self._early.items() if namespace not in (None, key.namespace)}
        for item in items:
            seen.add(_key(kind, item))
            changed |= self.upsert(kind, item, is_listed=True)
        for key, entry in list(self._kinds[kind].items()):
            is_gone = key not in seen and namespace in (None, key.namespace) and entry.version <= at
            if is_gone and (owner := self._drop(key)):
                changed.add(owner)
        self._gone = {k: v for k, v in self._gone.items() if k.kind != kind or v > at}
        self._listed[kind, namespace] = at
        return changed

    def forget(self, kind: str, namespace: str, name: str) -> None:
        """The API server said that there is no such object."""
        self._drop(ObjectKey(kind, namespace, name))

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        key = ObjectKey(kind, namespace, name)
        entry = self._kinds[kind].get(key)
        return _unpack(kind, entry) if entry else None

    def owned(self, owner: OwnerKey) -> list[Manifest]:
        """Children, Pods and warnings of a job or a RewardModel."""
        keys = sorted(self._owned.get(owner, ()))
        return [_unpack(key.kind, self._kinds[key.kind][key]) for key in keys if key[:3] != owner[:3]]

    def changed_at(self, owner: OwnerKey) -> int:
        """num_changes when an owner or anything of it changed last. Of one without any objects, when the last such
        lost its own: later than true, never earlier."""
        return self._changed.get(owner, self._forgotten)

    def names(self, resource: Resource) -> list[ObjectKey]:
        return list(self._kinds[resource.key])

    def __len__(self) -> int:
        return sum(map(len, self._kinds.values()))

    def _listed_at(self, key: ObjectKey) -> int:
        """A LIST without the object says that it was not there: an event from before it is an echo."""
        return max(self._listed.get((key.kind, None), 0), self._listed.get((key.kind, key.namespace), 0))

    def _drop(self, key: ObjectKey) -> OwnerKey | None:
        entry = self._kinds[key.kind].pop(key, None)
        if entry and entry.owner:
            self._unlink(entry.owner, key)
            return entry.owner
        return None

    def _unlink(self, owner: OwnerKey, key: ObjectKey) -> None:
        self._owned[owner].discard(key)
        self._touch(owner)
        if not self._owned[owner]:
            del self._owned[owner]
            self._forgotten = self._changed.pop(owner)

    def _touch(self, owner: OwnerKey) -> None:
        self.num_changes += 1
        self._changed[owner] = self.num_changes

    def _owner_of_event(self, event: Manifest) -> OwnerKey | None:
        """Whose Pod or workload an Event speaks of. Events about anything else are not kept."""
        key = _about(event)
        entry = self._kinds[key.kind].get(key) if key.kind not in _OWNERS else None
        return entry.owner if entry else None

    def _keep_early(self, event: Manifest) -> None:
        """The newest of each object, until that is known, or others need the room."""
        about = _about(event)
        if about.kind in BY_KEY and about.kind not in _OWNERS:
            self._early.pop(about, None)
            self._early[about] = event
            while len(self._early) > MAX_EARLY_WARNINGS:
                del self._early[next(iter(self._early))]

    def _bound_events(self) -> None:
        events = self._kinds["Event"]
        while len(events) > MAX_WARNINGS:
            self._drop(next(iter(events)))


def newest_warnings(events: Iterable[Manifest]) -> tuple[Manifest, ...]:
    """The newest Event of each object."""
    newest: dict[tuple[str, str], Manifest] = {}
    for event in sorted(events, key=_said_at):
        about = event.get("involvedObject") or {}
        newest[str(about.get("kind")), str(about.get("name"))] = event
    return tuple(newest.values())


def owner_of(kind: str, manifest: Manifest) -> OwnerKey | None:
    """The RLJob or RewardModel that an object is, or that its labels name."""
    metadata = manifest["metadata"]
    namespace, labels = metadata.get("namespace", ""), metadata.get("labels") or {}
    if kind in _OWNERS:
        return OwnerKey(kind, namespace, metadata["name"])
    if name := labels.get(LABEL_JOB):
        return OwnerKey(RLJOB.kind, namespace, name)
    if name := labels.get(LABEL_REWARD_MODEL):
        return OwnerKey(REWARD_MODEL.kind, namespace, name)
    return None


def _about(event: Manifest) -> ObjectKey:
    """What an Event speaks of. A ReplicaSet is no object of ours, but its name begins with its Deployment's."""
    about = event.get("involvedObject") or {}
    key = ObjectKey(str(about.get("kind")), str(about.get("namespace")), str(about.get("name")))
    if key.kind == "ReplicaSet":
        return ObjectKey("Deployment", key.namespace, key.name.rpartition("-")[0])
    return key


def _said_at(event: Manifest) -> str:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return str(next(filter(None, times), event["metadata"].get("creationTimestamp", "")))


def _key(kind: str, manifest: Manifest) -> ObjectKey:
    metadata = manifest["metadata"]
    return ObjectKey(kind, metadata.get("namespace", ""), metadata["name"])


def _version(manifest: Manifest) -> int:
    return int(manifest["metadata"]["resourceVersion"])


def _pack(manifest: Manifest) -> bytes:
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "managedFields"}
    return zlib.compress(json.dumps({**manifest, "metadata": metadata}, separators=(",", ":")).encode(), 1)


def _unpack(kind: str, entry: _Entry) -> Manifest:
    manifest: Manifest = json.loads(zlib.decompress(entry.data))
    # Items of a LIST do not say what they are.
    manifest["kind"], manifest["apiVersion"] = BY_KEY[kind].kind, BY_KEY[kind].api_version
    return manifest


def names_model(job: Manifest | None, name: str) -> bool:
    """Whether an RLJob refers to the RewardModel `name`."""
    rewards = ((job or {}).get("spec") or {}).get("rewards") or []
    return any((reward.get("rewardModelRef") or {}).get("name") == name for reward in rewards)
