"""What a service has accepted and answered, in a file of the run's folder, from which the next program goes on.

    request --> add --> the client gets its id --> the command runs --> finish --> the client gets its result
    snapshot of a model --> cut: what it covers is needed no more, but for results that a client may ask for

Invariants: what a client was told is in the file. Of a model, the file has its snapshot, each request since then that
changes it, and its last request.
"""

import json
import sqlite3
import zlib
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from rljob_trainer.tinker.streams import Result

_SCHEMA = """
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS entries (owner, number, client, path, body BLOB, result, PRIMARY KEY (owner, number));
CREATE TABLE IF NOT EXISTS snapshots (owner PRIMARY KEY, number, rank, name);
"""
"""The lock is exclusive since a volume of a network has no shared memory, which the log needs otherwise."""
_TABLES = ("entries", "snapshots")
_FORGET = (
    "DELETE FROM entries WHERE owner = ?1 AND number = ?2 AND number > 0 AND body = x'' "
    "AND number < (SELECT max(number) FROM entries WHERE owner = ?1)"
)
"""The last request of a model stays: it says with which number the next one comes."""


@dataclass(frozen=True)
class Entry:
    """A request that was accepted."""

    owner: str
    """Id of the model whose command it is; of the session or the sampler that it creates."""
    number: int
    client: str
    path: str
    body: bytes
    """Empty if it is not needed any more."""
    result: Result | None
    """None: it has not ended."""


@dataclass(frozen=True)
class Snapshot:
    number: int
    """Of the last command that it has."""
    rank: int
    """Of the adapter."""
    name: str
    """Of its folder."""


class Journal:
    def __init__(self, file: Path, kind: str) -> None:
        """`kind`: of the models. What a service with another one has left is dropped."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(file)
        self._db.executescript(_SCHEMA)
        number = zlib.crc32(kind.encode()) >> 1
        if self._db.execute("PRAGMA user_version").fetchone() != (number,):
            self._db.executescript(f"DELETE FROM entries; DELETE FROM snapshots; PRAGMA user_version = {number}")

    def close(self) -> None:
        self._db.close()

    def read(self) -> list[Entry]:
        """Return the entries in the order in which they were added."""
        rows = self._db.execute("SELECT owner, number, client, path, body, result FROM entries ORDER BY rowid")
        return [Entry(o, n, c, p, body, json.loads(r) if isinstance(r, str) else r) for o, n, c, p, body, r in rows]

    def read_snapshots(self) -> dict[str, Snapshot]:
        """Return the snapshots by model."""
        return {owner: Snapshot(*rest) for owner, *rest in self._db.execute("SELECT * FROM snapshots")}

    def add(self, owner: str, number: int, client: str, path: str, body: bytes) -> None:
        """Add a request, unless it came before."""
        values = (owner, number, client, path, body)
        self._write(("INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?, NULL)", values))

    def finish(self, owner: str, number: int, result: Result, *, changes: bool) -> None:
        """`changes`: whether the model's state comes from this command, too."""
        values = (result if isinstance(result, bytes) else json.dumps(result), changes, owner, number)
        self._write(("UPDATE entries SET result = ?, body = iif(?, body, x'') WHERE owner = ? AND number = ?", values))

    def cut(self, model: str, snapshot: Snapshot, is_kept: Callable[[str], bool]) -> None:
        """Drop what the snapshot has. `is_kept`: whether the result of a request is."""
        numbers = "WHERE owner = ? AND number BETWEEN 1 AND ? AND result IS NOT NULL"
        found = self._db.execute(f"SELECT number FROM entries {numbers}", (model, snapshot.number)).fetchall()
        self._write(
            ("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)", (model, *astuple(snapshot))),
            (f"UPDATE entries SET body = x'' {numbers}", (model, snapshot.number)),
            *((_FORGET, (model, number)) for (number,) in found if not is_kept(f"{model}:{number}")),
        )

    def forget(self, owner: str, number: int) -> None:
        """Drop a result, whose request may be needed still."""
        self._write((_FORGET, (owner, number)))

    def drop(self, owner: str) -> None:
        """Drop a model or a sampler, or a session with all that is its own."""
        values = (owner, f"{owner}:%")
        self._write(*((f"DELETE FROM {table} WHERE owner = ? OR owner LIKE ?", values) for table in _TABLES))

    def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        with self._db:  # all or nothing
            for statement, values in statements:
                self._db.execute(statement, values)
