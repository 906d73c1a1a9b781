"""The kinds of services that a server can host, by the argument of --serves."""

from collections.abc import Mapping
from typing import Any, Final

from rljob_service.kinds.base import Endpoint, Kind
from rljob_service.kinds.episodes import Episodes
from rljob_service.kinds.score import Score
from rljob_service.kinds.tools import Tools
from rljob_service.kinds.user import User

KINDS: Final[Mapping[str, Kind[Any]]] = {kind.name: kind for kind in (Score(), User(), Tools(), Episodes())}
ENDPOINTS: Final[Mapping[bytes, Endpoint]] = {
    path: endpoint for kind in KINDS.values() for path, endpoint in kind.endpoints.items()
}
"""Endpoints of all kinds, by path: a server knows also the paths of the others, to say where a request belongs."""
