"""The copy of a model from a head."""

from __future__ import annotations

import contextlib

import pytest

from rljob_api.errors import TransientError
from rljob_api.run.files import ModelFiles, RunFile
from rljob_cli.cluster.head_files import FolderCopy, HeadPorts

FILE = RunFile(name="exports/step-000004/model.safetensors", num_bytes=3, modified=1)


class Response:
    def __init__(self, body, status=200):
        self._body, self.status = body, status
        self.content = self

    async def read(self):
        return self._body

    async def iter_chunked(self, size):
        yield self._body

    def raise_for_status(self):
        pass


class Session:
    """Answers with a list of one file, and with `file` for it. Keeps the time limits."""

    def __init__(self, file):
        self._file, self.limits = file, {}

    @contextlib.asynccontextmanager
    async def get(self, url, *, headers, params=None, timeout=None):
        self.limits[url.rpartition("/")[2]] = timeout
        listed = ModelFiles(step=4, folder="exports/step-000004", files=[FILE])
        yield self._file if params is None else Response(listed.model_dump_json().encode())


async def test_copy_of_a_large_file_has_no_limit_but_for_silence(tmp_path):
    session = Session(Response(b"abc"))
    await FolderCopy(session, HeadPorts("", "http://h", "t"), tmp_path).copy_model("4")
    limit = session.limits["model.safetensors"]
    assert (limit.total, limit.sock_read) == (None, 60)
    assert (tmp_path / FILE.name).read_bytes() == b"abc"


@pytest.mark.parametrize("answer", [Response(b"", status=404), Response(b"ab")])
async def test_file_that_is_gone_or_has_changed_meanwhile_says_so(tmp_path, answer):
    with pytest.raises(TransientError, match=r"^exports/step-000004/model.safetensors has changed .*; try again$"):
        await FolderCopy(Session(answer), HeadPorts("", "http://h", "t"), tmp_path).copy_model("4")
