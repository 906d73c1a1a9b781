"""Files that a rank sends to the head, and reads back in ranges."""

from __future__ import annotations

import errno
import io
import os
import socket
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest

from rljob_api.errors import TransientError
from rljob_api.wire.contract import PORT_RUN_FILES
from rljob_trainer.run_folder import server as server_module
from rljob_trainer.run_folder.client import HeadUnreachableError, RemoteFolder, reach
from rljob_trainer.run_folder.file_facts import FileFacts, HashedStream, describe_file
from rljob_trainer.run_folder.server import RunFileServer
from tests.support.loopback import next_address
from tests.support.waiting import DEADLINE_SECONDS

TOKEN = "secret"
STEP = "checkpoints/step-000010/trainer"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunFileServer]:
    server = RunFileServer(tmp_path, next_address(), TOKEN)
    yield server
    server.close()


@pytest.fixture
def folder(server: RunFileServer) -> RemoteFolder:
    return RemoteFolder(server.folder.url, STEP, TOKEN)


def test_streamed_file_is_complete_on_the_disk_and_read_in_ranges(folder: RemoteFolder, tmp_path: Path) -> None:
    parts = [os.urandom(size) for size in (10, 9 << 20, 0, 1, (4 << 20) - 1, 5)]
    with folder.create("__0_0.distcp") as stream:
        for part in parts:
            assert stream.write(part) == len(part)
        assert stream.tell() == sum(map(len, parts))
        assert not (tmp_path / STEP / "__0_0.distcp").exists(), "a file that has its name is complete"
    whole = b"".join(parts)
    assert (tmp_path / STEP / "__0_0.distcp").read_bytes() == whole
    assert [path.name for path in (tmp_path / STEP).iterdir()] == ["__0_0.distcp"]
    with folder.open("__0_0.distcp") as file:
        for offset, length in ((0, 10), (5 << 20, 3 << 20), (len(whole) - 1, 1)):
            assert file.read_range(offset, length) == whole[offset : offset + length]
    assert folder.read("__0_0.distcp") == whole


def test_neither_side_holds_a_file_in_memory(folder: RemoteFolder, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        with folder.create("large") as stream:
            for _ in range(24):
                stream.write(bytes(1 << 20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / STEP / "large").stat().st_size == 24 << 20
    assert peak < 12 << 20, "sender and receiver run in this process"


def test_folder_is_sent_with_its_folders(server: RunFileServer, tmp_path: Path) -> None:
    source = tmp_path / "local"
    (source / "adapter").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "adapter" / "model-00001-of-00002.safetensors").write_bytes(b"\0" * 100)
    RemoteFolder(server.folder.url, ".export.partial", TOKEN).upload(source)
    sent = {path.relative_to(tmp_path / ".export.partial").as_posix() for path in tmp_path.glob(".export.partial/**/*")}
    assert sent == {"config.json", "adapter", "adapter/model-00001-of-00002.safetensors"}


def test_failed_writer_leaves_no_file(folder: RemoteFolder, tmp_path: Path) -> None:
    def write_and_fail() -> None:
        with folder.create("__0_0.distcp") as stream:
            stream.write(b"x" * (5 << 20))
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        write_and_fail()
    with folder.create("other") as stream:
        stream.write(b"y")
    assert not (tmp_path / STEP / "__0_0.distcp").exists()
    assert folder.read("other") == b"y", "the server continues"


def test_full_disk_of_the_head_has_the_text_by_which_the_driver_knows_it(
    folder: RemoteFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(server_module, "_receive", fail)
    with pytest.raises(TransientError, match="No space left on device") as failed, folder.create("f") as stream:
        stream.write(bytes(64 << 20))
    assert not isinstance(failed.value, HeadUnreachableError), "a new group would fail in the same way"


def test_changed_bytes_are_an_error(folder: RemoteFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    async def receive(content: object, path: Path) -> tuple[int, int]:
        return 3, 0

    monkeypatch.setattr(server_module, "_receive", receive)
    monkeypatch.setattr(Path, "replace", lambda self, other: None)
    with pytest.raises(HeadUnreachableError, match="CRC-32"), folder.create("f") as stream:
        stream.write(b"abc")


def test_head_that_has_ended_is_an_error_of_the_connection(tmp_path: Path) -> None:
    server = RunFileServer(tmp_path, next_address(), TOKEN)
    server.close()
    folder = RemoteFolder(server.folder.url, STEP, TOKEN)
    with pytest.raises(HeadUnreachableError, match="ConnectionRefusedError"), folder.create("__0_0.distcp") as stream:
        stream.write(b"x")


def test_whole_file_is_streamed_in_pieces(folder: RemoteFolder) -> None:
    content = os.urandom((9 << 20) + 5)
    with folder.create("__0_0.distcp") as stream:
        stream.write(content)
    pieces = list(folder.stream("__0_0.distcp"))
    assert b"".join(pieces) == content
    assert max(map(len, pieces)) <= 4 << 20
    assert describe_file(folder, "__0_0.distcp") == stream_facts(content)


def test_head_that_dies_while_it_sends_has_not_sent_a_damaged_file(tmp_path: Path) -> None:
    """A checkpoint would be set aside for that."""
    with socket.create_server((next_address(), 0)) as listening:
        host, port = listening.getsockname()

        def answer() -> None:
            with listening.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + bytes(40))

        with ThreadPoolExecutor(1) as thread:
            thread.submit(answer)
            with pytest.raises(HeadUnreachableError, match="lacks 60 bytes"):
                describe_file(RemoteFolder(f"http://{host}:{port}/run", STEP, TOKEN), "__0_0.distcp")


def stream_facts(content: bytes) -> FileFacts:
    stream = HashedStream(io.BytesIO())
    stream.write(content)
    return stream.facts


def test_missing_file_is_not_found(folder: RemoteFolder) -> None:
    with pytest.raises(FileNotFoundError):
        folder.read(".metadata")
    with pytest.raises(FileNotFoundError):
        describe_file(folder, ".metadata")


def test_nothing_else_of_the_run_can_be_reached(server: RunFileServer, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for path in (
        "metrics.jsonl",
        ".run-id",
        "checkpoints/step-000010/driver.json",
        "checkpoints/step-000010/trainer/../driver.json",
        "checkpoints/step-000010/trainer/..",
        "checkpoints/step-000010/trainer/%2e%2e/driver.json",
        "checkpoints/step-000010/trainer/..%2Fdriver.json",
        ".export.partial/a/../../metrics.jsonl",
        "export/config.json",
        "../etc/passwd",
    ):
        for method in ("GET", "PUT"):
            assert send(server, method, f"/run/{path}", TOKEN) in (403, 404), (method, path)
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_served_without_the_token(server: RunFileServer, tmp_path: Path) -> None:
    for method in ("GET", "PUT"):
        for token in ("", "wrong"):
            assert send(server, method, f"/run/{STEP}/file", token) == 401, (method, token)
    assert not (tmp_path / "checkpoints").exists()


def send(server: RunFileServer, method: str, path: str, token: str) -> int:
    """Send the path as it is."""
    host = server.folder.url.split("/")[2]
    connection = HTTPConnection(host, timeout=DEADLINE_SECONDS)
    connection.request(method, path, body=b"x", headers={"Authorization": f"Bearer {token}"})
    status = connection.getresponse().status
    connection.close()
    return status


def test_port_in_use_is_an_error(tmp_path: Path) -> None:
    host = next_address()
    with socket.create_server((host, PORT_RUN_FILES)), pytest.raises(TransientError, match=f"{host}:{PORT_RUN_FILES}"):
        RunFileServer(tmp_path, host, TOKEN)


def test_rank_that_sees_the_run_folder_writes_to_it_and_others_send(server: RunFileServer, tmp_path: Path) -> None:
    run, checkpoint = server.folder, tmp_path / "checkpoints" / "step-000010"
    assert reach(run, checkpoint, TOKEN) == checkpoint
    elsewhere = replace(run, path=tmp_path / "emptyDir")
    through_head = RemoteFolder(run.url, "checkpoints/step-000010", TOKEN)
    assert reach(elsewhere, elsewhere.path / "checkpoints" / "step-000010", TOKEN) == through_head
    elsewhere.path.mkdir()
    (elsewhere.path / ".run-id").write_text("of another run")
    assert reach(elsewhere, elsewhere.path / "checkpoints" / "step-000010", TOKEN) == through_head


def test_id_of_a_run_folder_stays(server: RunFileServer, tmp_path: Path) -> None:
    again = RunFileServer(tmp_path, next_address(), TOKEN)
    again.close()
    assert again.folder.id == server.folder.id
