"""The requests that one worker process executes, from their start to their one result. Pure.

    runs -> (its time is over, or its client has left) ends -> result

Invariants: each request gets exactly one result; one that must end gets the reason for that, whatever its worker
answers later; what ends the process never counts against a request that did not cause it, if the cause is known.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rljob_api.wire.base import InvalidReason
from rljob_service.results import ExecutionResult, failure

Callback = Callable[[ExecutionResult], None]


@dataclass(eq=False)
class Request:
    number: int
    """In the frames of its worker, from 1."""
    body: bytes
    num_samples: int
    callback: Callback
    ends_as: ExecutionResult | None = None
    """Its result, since it must end."""


class RunningRequests(dict[int, Request]):
    """By number."""

    _last_number = 0

    @property
    def most_samples(self) -> int:
        """The largest number of samples of a request; 1 without one."""
        return max((request.num_samples for request in self.values()), default=1)

    def start(self, body: bytes, num_samples: int, callback: Callback) -> Request:
        self._last_number += 1
        request = self[self._last_number] = Request(self._last_number, body, num_samples, callback)
        return request

    def must_end(self, number: int, result: ExecutionResult) -> bool:
        """Note why a request must end. Return whether this is news: it runs, and did not have to end before."""
        request = self.get(number)
        if request is None or request.ends_as is not None:
            return False
        request.ends_as = result
        return True

    def finish(self, number: int, result: ExecutionResult) -> tuple[Callback, ExecutionResult]:
        """Take the worker's answer. Return the result, and who gets it. Raise KeyError for what does not run."""
        request = self.pop(number)
        return request.callback, request.ends_as or result

    def end_all(self, result: ExecutionResult, culprit: int = 0) -> list[tuple[Callback, ExecutionResult]]:
        """The process has ended. Return the result of each request.

        `culprit`: the request that caused it; 0 if that is unknown, or if none did.
        """
        ended = dict(self)
        self.clear()
        is_known = culprit in ended and len(ended) > 1
        others = failure(
            InvalidReason.INTERRUPTED,
            f"another request of its process (episodesPerProcess) ended it: {result[0].message}",
        )
        found = []
        for number, request in ended.items():
            default = others if is_known and number != culprit else result
            found.append((request.callback, request.ends_as or default))
        return found
