"""Manifests that the API server refused for good, and when to send them again.

Consumes the refusals of one process's writes and dry runs; produces the same refusal without a request until the next
try is due. Invariant: a manifest of a changed spec, or of an owner with changed annotations, is sent at once.
"""

from collections.abc import Awaitable, Callable
from copy import copy
from typing import NamedTuple

from rljob_api.errors import UserError
from rljob_core.backend import ForeignObjectError, Manifest, Owner
from rljob_core.children.common import digest

FIRST_RETRY_SECONDS = 30.0
MAX_RETRY_SECONDS = 300.0
"""The cause may be repaired in the cluster, such as a policy or a missing kind."""
MAX_REFUSED = 1000

Call = Callable[[Manifest], Awaitable[None]]


class _Refused(NamedTuple):
    error: UserError
    """A copy, which is never raised: a traceback keeps the manifest and all else that its frames refer to."""
    until: float
    delay_seconds: float


class Refusals:
    """The refusals of all owners; of more than MAX_REFUSED the latest."""

    def __init__(self) -> None:
        self._refused: dict[str, _Refused] = {}

    def guard(self, owner: Owner, now: float, call: Call) -> Call:
        """Return `call` without the requests that are refused. `now`: seconds of one clock."""

        async def call_if_due(manifest: Manifest) -> None:
            key = _identify(owner, manifest) if self._refused else ""
            known = self._refused.get(key)
            if known and now < known.until:
                raise copy(known.error)
            try:
                await call(manifest)
            except ForeignObjectError:
                raise  # the other object may be deleted at any time
            except UserError as error:
                self._record(_identify(owner, manifest), known, error, now)
                raise

        return call_if_due

    def _record(self, key: str, known: _Refused | None, error: UserError, now: float) -> None:
        delay = min(MAX_RETRY_SECONDS, known.delay_seconds * 2) if known else FIRST_RETRY_SECONDS
        self._refused.pop(key, None)
        self._refused[key] = _Refused(copy(error), now + delay, delay)
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]


def _identify(owner: Owner, manifest: Manifest) -> str:
    return digest((owner.metadata.generation, owner.metadata.annotations, manifest))
