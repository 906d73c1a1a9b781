"""What a service has accepted and answered, in a file of the run's folder, from which the next program goes on.

    request --> add --> the client gets its id --> the command runs --> finish --> the client gets its result
    snapshot of a model --> cut: what it covers is needed no more, but for results that a client may ask for

Invariants: what a client was told is in the file. Of a model, the file has its snapshot, each request since then that
changes it, and the results of its last commands.
"""

import json
import sqlite3
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from rljob_api.errors import TransientError, UserError
from rljob_trainer.tinker.streams import NUM_KEPT, Result

_SCHEMA = """
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS entries (owner, number, client, path, body BLOB, result, PRIMARY KEY (owner, number));
CREATE TABLE IF NOT EXISTS snapshots (owner PRIMARY KEY, rank, name);
"""
"""The lock is exclusive since a volume of a network has no shared memory, which the log needs otherwise."""
_TABLES = ("entries", "snapshots")
_UP_TO = "WHERE owner = ? AND number <= ?"


class Entry(NamedTuple):
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


class Snapshot(NamedTuple):
    rank: int
    """The adapter's."""
    name: str
    """Its folder's."""


class Journal:
    def __init__(self, file: Path, kind: str) -> None:
        """`kind`: of the models. What a service with another one has left is dropped."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(file)
        try:
            self._db.executescript(_SCHEMA)
            number = zlib.crc32(kind.encode()) >> 1
            if self._db.execute("PRAGMA user_version").fetchone() != (number,):
                self._db.executescript(f"DELETE FROM entries; DELETE FROM snapshots; PRAGMA user_version = {number}")
            [(found,)] = self._db.execute("PRAGMA quick_check(1)")
            if found != "ok":
                raise sqlite3.DatabaseError(found)
        except sqlite3.OperationalError as error:  # an earlier program may still have it
            raise TransientError(f"{file}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise UserError(f"{file} is damaged: {error}; restore it, or remove it, and clients begin again") from error

    def close(self) -> None:
        self._db.close()

    def read(self) -> list[Entry]:
        """Return the entries in the order in which they were added."""
        rows = map(Entry._make, self._db.execute("SELECT * FROM entries ORDER BY rowid"))
        return [row._replace(result=json.loads(row.result)) if isinstance(row.result, str) else row for row in rows]

    def read_snapshots(self) -> dict[str, Snapshot]:
        """Return the snapshots by model."""
        return {owner: Snapshot(*rest) for owner, *rest in self._db.execute("SELECT * FROM snapshots")}

    def add(self, owner: str, number: int, client: str, path: str, body: bytes) -> None:
        """Add a request, unless it came before."""
        values = (owner, number, client, path, body)
        self._write(("INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?, NULL)", values))

    def finish(self, owner: str, number: int, result: Result, *, changes: bool) -> None:
        """Add the result of a command, and drop old ones. `changes`: whether the model's state comes from it, too."""
        values = (result if isinstance(result, bytes) else json.dumps(result), changes, owner, number)
        self._write(
            ("UPDATE entries SET result = ?, body = iif(?, body, x'') WHERE owner = ? AND number = ?", values),
            (f"DELETE FROM entries {_UP_TO} AND number > 0 AND body = x''", (owner, number - NUM_KEPT)),
        )

    def cut(self, model: str, number: int, snapshot: Snapshot) -> None:
        """Drop the requests that the snapshot has: those up to a number."""
        self._write(
            ("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", (model, *snapshot)),
            (f"UPDATE entries SET body = x'' {_UP_TO}", (model, number)),
        )

    def drop(self, owner: str) -> None:
        """Drop a model or a sampler, or a session with all that is its own."""
        values = (owner, f"{owner}:%")
        self._write(*((f"DELETE FROM {table} WHERE owner = ? OR owner LIKE ?", values) for table in _TABLES))

    def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        with self._db:  # all or nothing
            for statement, values in statements:
                self._db.execute(statement, values)
