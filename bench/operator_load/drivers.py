"""The drivers of all jobs in one process: `python -m operator_load.drivers PORT HUNG_SHARE`, until it is killed.

Listens on every loopback address; each head Pod has one. What a driver answers changes as while a job trains:
its step twice a minute, its wait at every request. A share of them never answers. GET /counts has the requests so far.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import cast

from rljob_api.wire.driver_status import DriverStatus

_STEP_SECONDS = 30.0
_TOTAL_STEPS = 10_000
_SAMPLES = 512


class Drivers:
    def __init__(self, hung_share: float) -> None:
        self._hung_share = hung_share
        self._started_at: dict[str, float] = {}
        self.num_answered = self.num_hung = self.num_without_token = 0

    def is_hung(self, address: str) -> bool:
        return random.Random(address).random() < self._hung_share

    def answer(self, address: str) -> bytes:
        seconds = time.monotonic() - self._started_at.setdefault(address, time.monotonic())
        step, inside = divmod(seconds, _STEP_SECONDS)
        num_open = int(_SAMPLES * (1 - inside / _STEP_SECONDS))
        status = DriverStatus(
            step=int(step),
            total_steps=_TOTAL_STEPS,
            phase="generate",
            waits_for=f"waits for {num_open} of {_SAMPLES} completions",
            weight_version=int(step),
            reward=round(0.3 + step / _TOTAL_STEPS, 4) if step else None,
            tokens_per_second=1000.0 + inside,
            step_seconds=_STEP_SECONDS if step else None,
        )
        return status.model_dump_json().encode()

    def counts(self) -> bytes:
        counts = {"answered": self.num_answered, "hung": self.num_hung, "without_token": self.num_without_token}
        return json.dumps(counts | {"drivers": len(self._started_at)}).encode()


class Connection(asyncio.Protocol):
    """One request of a client that sends no body."""

    def __init__(self, drivers: Drivers) -> None:
        self._drivers, self._received = drivers, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._received.endswith(b"\r\n\r\n"):
            return
        drivers, address = self._drivers, self._transport.get_extra_info("sockname")[0]
        if self._received.startswith(b"GET /counts "):
            return self._reply(b"200 OK", drivers.counts())
        if b"authorization: bearer " not in self._received.lower():
            drivers.num_without_token += 1
            return self._reply(b"401 Unauthorized", b"")
        if drivers.is_hung(address):
            drivers.num_hung += 1
            return None
        drivers.num_answered += 1
        return self._reply(b"200 OK", drivers.answer(address))

    def _reply(self, status: bytes, body: bytes) -> None:
        headers = b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._transport.write(b"HTTP/1.1 " + status + b"\r\n" + headers + body)
        self._transport.close()


async def main(port: int, hung_share: float) -> None:
    drivers = Drivers(hung_share)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(drivers), "0.0.0.0", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
