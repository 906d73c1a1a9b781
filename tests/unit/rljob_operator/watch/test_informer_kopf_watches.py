"""What kopf sees of a watch, however its bytes arrive."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.watch.informer import _WatchedStream

EVENTS = [
    {"type": kind, "object": {"metadata": {"name": "a", "resourceVersion": str(version)}, "text": "ä\\n"}}
    for version, kind in enumerate(("ADDED", "MODIFIED", "BOOKMARK", "DELETED"), start=7)
]
ERROR = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
WIRE = b"".join(json.dumps(event).encode() + b"\n" for event in [*EVENTS, ERROR])


class Content:
    """A response's body in the given chunks."""

    def __init__(self, chunks):
        self.chunks = chunks

    async def iter_chunked(self, size):
        for chunk in self.chunks:
            yield chunk


async def read(chunks):
    """Return what the informer gets, and what kopf gets."""
    taken = []
    stream = _WatchedStream(Content(chunks), taken.append)
    return taken, [json.loads(line) async for line in stream.iter_chunked(1)]


@given(st.lists(st.integers(0, len(WIRE))))
async def test_events_go_to_the_informer_and_their_versions_to_kopf(cuts):
    ends = [0, *sorted(cuts), len(WIRE)]
    taken, seen = await read([WIRE[start:end] for start, end in itertools.pairwise(ends)])
    assert taken == [event for event in EVENTS if event["type"] != "BOOKMARK"]
    assert [event["type"] for event in seen] == ["BOOKMARK"] * 4 + ["ERROR"]
    assert [event["object"]["metadata"]["resourceVersion"] for event in seen[:4]] == ["7", "8", "9", "10"]
    assert [set(event["object"]) for event in (*seen[:2], seen[3])] == [{"metadata"}] * 3, "no object"


@given(st.integers(0, len(WIRE)))
async def test_event_that_breaks_off_is_left_to_the_next_watch(length):
    taken, seen = await read([WIRE[:length]])
    assert len(seen) == WIRE[:length].count(b"\n")
    assert len(taken) <= len(seen)


async def test_an_event_that_is_deeper_than_parsers_take_stops_no_watch():
    event = json.dumps({"type": "ADDED", "object": {"metadata": {"resourceVersion": "7"}, "spec": "DEEP"}})
    taken, seen = await read([event.replace('"DEEP"', '{"a":' * 5000 + "1" + "}" * 5000).encode(), b"\n"])
    assert [each["object"]["metadata"] for each in (*taken, *seen)] == [{"resourceVersion": "7"}] * 2
