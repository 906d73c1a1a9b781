"""The kinds of services that a server can host, by the argument of --serves."""

from collections.abc import Mapping
from typing import Any

from rljob_service.kinds.base import Endpoint, Kind
from rljob_service.kinds.served import Episodes, Score, Tools, User

KINDS: Mapping[str, Kind[Any]] = {kind.name: kind for kind in (Score(), User(), Tools(), Episodes())}
ENDPOINTS: Mapping[bytes, Endpoint] = {
    path: endpoint for kind in KINDS.values() for path, endpoint in kind.endpoints.items()
}
"""Endpoints of all kinds, by path: a server knows also the paths of the others, to say where a request belongs."""
