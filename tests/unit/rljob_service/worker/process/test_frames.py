"""Frames between server and worker: put together from any parts, and bounded before they are held in memory."""

from __future__ import annotations

import pytest

from rljob_service.worker.process.frames import (
    MAX_FRAME_BYTES,
    BrokenFrameError,
    Frame,
    FrameBuffer,
    add_computed,
    encode,
    split_computed,
)

STREAM = encode(b"") + encode(b"first", 7) + encode(b"x" * 300, 8) + encode(b"last", 1 << 31)


@pytest.mark.parametrize("size", [1, 3, 100, len(STREAM)])
def test_frames_are_put_together_from_parts(size: int) -> None:
    buffer = FrameBuffer()
    frames = [frame for at in range(0, len(STREAM), size) for frame in buffer.feed(STREAM[at : at + size])]
    assert frames == [(0, b""), (7, b"first"), (8, b"x" * 300), (1 << 31, b"last")]


@pytest.mark.parametrize("size", [1, 3, 100, len(STREAM)])
def test_long_frame_is_skipped_and_never_held(size: int) -> None:
    buffer = FrameBuffer(max_bytes=10)
    frames = []
    for at in range(0, len(STREAM), size):
        frames += buffer.feed(STREAM[at : at + size])
        assert len(buffer._bytes) <= 10 + 8
    assert frames == [(0, b""), (7, b"first"), (8, None), (1 << 31, b"last")]


def test_long_frame_that_arrives_whole_is_skipped() -> None:
    buffer = FrameBuffer(max_bytes=10)
    frames = [*buffer.feed(encode(b"x" * 11, 3)), *buffer.feed(encode(b"x" * 10))]
    assert frames == [Frame(3, None), Frame(0, b"x" * 10)]


def test_length_over_the_protocols_limit_breaks_the_stream() -> None:
    with pytest.raises(BrokenFrameError, match="was announced"):
        FrameBuffer().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big") + bytes(4))


def test_answer_says_for_how_long_its_request_only_computed() -> None:
    assert split_computed(add_computed(b"[1]", 1500)) == (0.0015, b"[1]")
    assert split_computed(add_computed(b"[1]", None)) == (None, b"[1]")


@pytest.mark.parametrize("garbage", [b"", b"-1\n[]", b"1.5\n[]", b"1e9\n[]", b"9" * 13 + b"\n[]", b"{}"])
def test_answer_that_begins_with_garbage_breaks_the_stream(garbage: bytes) -> None:
    with pytest.raises(BrokenFrameError):
        split_computed(garbage)
