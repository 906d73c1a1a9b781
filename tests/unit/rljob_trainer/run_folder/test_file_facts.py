"""What is hashed while it is written is what a reader finds, and any change is found."""

import io
import os

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.run_folder.file_facts import (
    DamagedCheckpointError,
    FileFacts,
    HashedStream,
    describe_file,
    verify_files,
    verify_sizes,
)


@given(st.lists(st.binary(max_size=64) | st.integers(0, 3 << 20).map(bytes), max_size=5))
def test_stream_passes_all_bytes_on_and_knows_their_hash(pieces):
    target, content = io.BytesIO(), b"".join(pieces)
    stream = HashedStream(target)
    for piece in pieces:
        assert stream.write(piece) == len(piece)
    assert target.getvalue() == content
    assert stream.tell() == len(content)
    assert stream.facts == FileFacts(num_bytes=len(content), hash=xxhash.xxh3_128(content).hexdigest())


@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 20, (2 << 20) + 3])
def test_file_has_the_facts_of_the_stream_that_wrote_it(tmp_path, num_bytes):
    with (tmp_path / "file").open("wb") as file:
        stream = HashedStream(file)
        stream.write(os.urandom(num_bytes))
    assert describe_file(tmp_path, "file") == stream.facts
    verify_files(tmp_path, {"file": stream.facts}, ["file"])


def test_sync_of_a_stream_covers_what_is_buffered(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        stream = HashedStream(file)
        stream.write(b"buffered")
        os.fsync(stream.fileno())
        assert (tmp_path / "file").read_bytes() == b"buffered"


def flip(path):
    content = bytearray(path.read_bytes())
    content[3] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message", "has_other_size"),
    [
        (flip, r"/file has the hash [0-9a-f]{32} instead of [0-9a-f]{32}$", False),
        (lambda path: os.truncate(path, 1000), "/file has 1,000 bytes instead of 1,234$", True),
        (lambda path: path.unlink(), "/file does not exist; it had 1,234 bytes$", True),
    ],
    ids=["flipped bit", "truncated", "missing"],
)
def test_damage_is_an_error_that_names_file_expected_and_found(tmp_path, damage, message, has_other_size):
    (tmp_path / "file").write_bytes(bytes(1234))
    files = {"file": describe_file(tmp_path, "file")}
    verify_sizes(tmp_path, files)
    damage(tmp_path / "file")
    with pytest.raises(DamagedCheckpointError, match=message):
        verify_files(tmp_path, files, ["file"])
    verify_files(tmp_path, files, [])
    if has_other_size:
        with pytest.raises(DamagedCheckpointError, match=message):
            verify_sizes(tmp_path, files)
    else:
        verify_sizes(tmp_path, files)
