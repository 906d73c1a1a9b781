"""Delivery of records to one tracker: a thread, a bounded queue, retries, and a count of what was lost.

The tracker's client, which `trackers` has, does the I/O, always in this thread. Invariant: no method but `close` waits,
whatever the tracker's server does; and a record is sent, waits, or is counted as lost.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rljob_api.run.summaries import DeliveryCounts
from rljob_trainer.outages import pause

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Records. A step has one of some kilobytes, so these are hours of the fastest steps."""
GIVE_UP_SECONDS = 6 * 3600.0
"""Age at which a record that cannot be sent is lost."""
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


class RefusedError(Exception):
    """The tracker's server will never accept this record: another attempt is useless."""


class UnsentError(Exception):
    """A client ends with records that it took and did not send."""


class Closable(Protocol):
    def close(self) -> None:
        """Raise UnsentError unless what was sent has arrived."""


Send = Callable[[Any], None]
"""Gives a record to the client."""


@dataclass(frozen=True)
class DeliveryLimits:
    max_waiting: int = MAX_WAITING
    give_up_seconds: float = GIVE_UP_SECONDS
    first_retry_seconds: float = FIRST_RETRY_SECONDS


class Delivery:
    """Sends what is submitted, in order. A thread starts with the first record."""

    def __init__(self, name: str, connect: Callable[[], Closable], limits: DeliveryLimits | None = None) -> None:
        """`connect` returns a client. It is called again after a failure, since a client may be broken by it."""
        self.name = name
        self._connect, self._limits = connect, limits or DeliveryLimits()
        self._changed = threading.Condition()
        self._queue: deque[tuple[float, Send, str]] = deque()
        self._sending: str | None = None
        """The key of the record that is sent now."""
        self._taken: list[str] = []
        """Keys of the records that the client took. Some clients send them later."""
        self._url = ""
        self.missed: list[str] = []
        """Keys of the records that are lost."""
        self._num_sent = self._num_failures = 0
        self._ends_at: float | None = None
        self._client: Closable | None = None
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)

    def submit(self, send: Send, key: str = "") -> None:
        """Queue a call. If the queue is full, its oldest record is lost. `key`: names the record that is sent."""
        with self._changed:
            if self._ends_at is not None:
                self._lose(key, "it came after the end of the run")
                return
            if len(self._queue) >= self._limits.max_waiting:
                self._lose(self._queue.popleft()[2], f"{self._limits.max_waiting} records wait")
            self._queue.append((time.monotonic(), send, key))
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()

    def counts(self) -> DeliveryCounts:
        with self._changed:
            return self._count()

    def close(self, ends_at: float) -> None:
        """Send what waits and close the client, until `ends_at` of time.monotonic(). What then waits is lost."""
        with self._changed:
            self._ends_at = ends_at
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, ends_at - time.monotonic()))
        with self._changed:
            remaining = [] if self._sending is None else [self._sending]
            remaining += [key for *_, key in self._queue]
            if self._thread.is_alive() and not remaining:  # the client that closes may still send what it took
                remaining, self._taken = self._taken, []
            for key in remaining:
                self._lose(key, "the run ended")
            self._queue.clear()
            self._sending = None
        counts = self.counts()
        if counts.lost:
            log.warning("%s: %d records were sent, %d are lost", self.name, counts.sent, counts.lost)

    def _count(self) -> DeliveryCounts:
        waiting = len(self._queue) + (self._sending is not None)
        return DeliveryCounts(
            sent=self._num_sent + len(self._taken), lost=len(self.missed), waiting=waiting, url=self._url
        )

    def _lose(self, key: str, why: str) -> None:
        if not self.missed:
            log.warning("%s: a record is lost, because %s; metrics.jsonl has it", self.name, why)
        self.missed.append(key)

    def _run(self) -> None:
        while (entry := self._take()) is not None:
            outcome = self._deliver(*entry[:2])
            with self._changed:
                if self._sending is not None:  # else close() has counted it as lost
                    self._sending = None
                    if outcome is None:
                        self._taken.append(entry[2])
                    else:
                        self._lose(entry[2], outcome)
                self._changed.notify_all()
        self._disconnect()

    def _take(self) -> tuple[float, Send, str] | None:
        """Wait for the next record; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ends_at is not None)
            if not self._queue:
                return None
            entry = self._queue.popleft()
            self._sending = entry[2]
            return entry

    def _deliver(self, submitted_at: float, send: Send) -> str | None:
        """Send one record. Return why it is lost, or None."""
        while True:
            client = self._client
            try:
                if client is None:
                    try:
                        client = self._client = self._connect()
                        self._show_url(getattr(client, "url", None) or "")
                    except RefusedError as error:  # not the record's fault, and someone may correct the server
                        raise ConnectionError(str(error)) from error
                send(client)
            except RefusedError as error:
                return f"the server refuses it: {error}"
            except Exception as error:  # unknown errors of three libraries: none is a reason to lose a run
                if why := self._wait_after(error, submitted_at):
                    return why
            else:
                if self._num_failures:
                    log.info("%s answers again", self.name)
                self._num_failures = 0
                return None

    def _show_url(self, url: str) -> None:
        if url != self._url:
            log.info("%s shows the run at %s", self.name, url)
        self._url = url

    def _wait_after(self, error: Exception, submitted_at: float) -> str:
        """Wait before the next attempt. Return why there is none, else an empty text."""
        self._num_failures += 1
        if self._num_failures == 1:
            log.warning("%s does not answer, and is tried again: %s: %s", self.name, type(error).__name__, error)
        self._disconnect()
        with self._changed:
            now = time.monotonic()
            if now - submitted_at > self._limits.give_up_seconds:
                return f"{self.name} does not answer for {self._limits.give_up_seconds / 3600:.0f} hours"
            wait = pause(self._limits.first_retry_seconds, MAX_RETRY_SECONDS, self._num_failures - 1)
            if self._ends_at is None:
                self._changed.wait_for(lambda: self._ends_at is not None, timeout=wait)
            elif now + wait < self._ends_at:
                self._changed.wait(timeout=wait)
            else:
                return "the run ended"
        return ""

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        unsent: list[str] = []
        try:
            client.close()
        except UnsentError as error:
            unsent = self._taken
            log.warning("%s: %d records may not have arrived: %s", self.name, len(unsent), error)
        except Exception as error:
            log.warning("%s: cannot close: %s: %s", self.name, type(error).__name__, error)
        with self._changed:
            self._num_sent += len(self._taken) - len(unsent)
            self.missed += unsent
            self._taken = []
