"""What a replica serves to other replicas: the parts that it has of the file that it downloads, or has downloaded.

Leaves the choice of sources to the receiver, and the list of replicas to the head. A replica that reads the publisher's
file in place serves nothing: so do the others on that machine.
"""

import contextlib
import logging
from collections.abc import Iterator

from rljob_api.wire.contract import PORT_WEIGHTS
from rljob_api.wire.ports import listening_port
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.weights.file_hash import CHUNK_BYTES, HASH_BYTES
from rljob_trainer.weights.file_server import ServedFile, WeightServer

logger = logging.getLogger(__name__)


class SharedDownload:
    """Serves the download from construction to close()."""

    def __init__(self, host: str = "", token: str = "") -> None:
        """Without a host, serve nothing; nor if the port is in use, as by a trainer in the node's network."""
        self.address = ""
        """Where other replicas may request parts."""
        self._current: tuple[str, ServedFile] | None = None
        """Its name, and the file."""
        self._server: WeightServer | None = None
        if host:
            address = f"{host}:{listening_port(PORT_WEIGHTS)}"
            try:
                self._server = WeightServer(host, token, self._find)
                self.address = address
            except OSError as error:
                logger.warning("weights are not shared with other replicas: %s: %s", address, error)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def begin(self, manifest: WeightManifest, data: memoryview) -> bytearray:
        """Serve the file mapped at `data` from now on, which has no part of the announced file yet. Return where to
        enter the hashes of its chunks as they are verified."""
        hashes = bytearray(-(-manifest.num_bytes // CHUNK_BYTES) * HASH_BYTES)
        self._current = manifest.url.rpartition("/")[2], ServedFile(data, hashes)
        return hashes

    @contextlib.contextmanager
    def _find(self, name: str) -> Iterator[ServedFile | None]:
        current = self._current
        yield current[1] if current is not None and current[0] == name else None
