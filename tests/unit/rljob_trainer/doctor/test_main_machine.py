"""What a container lacks, and what to do about it."""

import shutil
from types import SimpleNamespace

import pytest

from rljob_trainer.doctor.main import check_folder, check_open_files, check_rdma, check_shared_memory


@pytest.mark.parametrize(("mebibytes", "state"), [(64, "failed"), (16_384, "ok")])
def test_shared_memory_of_kubernetes_default_is_too_small(monkeypatch, tmp_path, mebibytes, state):
    size = mebibytes << 20
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=size, free=size))
    check = check_shared_memory(tmp_path)
    assert check.state == state
    assert ("emptyDir with medium Memory" in check.remedy) == (state == "failed")


def test_missing_shared_memory_is_a_failure(tmp_path):
    assert check_shared_memory(tmp_path / "shm").state == "failed"


def test_folder_must_be_writable(tmp_path):
    assert check_folder(tmp_path).state == "ok"
    assert check_folder(tmp_path / "missing").state == "failed"


@pytest.mark.parametrize(
    ("devices", "memlock", "state", "part"),
    [
        ([], 65536, "ok", "TCP"),
        (["uverbs0", "uverbs1"], -1, "ok", "uverbs0, uverbs1; locked memory: unlimited"),
        (["uverbs0"], 65536, "warning", "65536 bytes"),
    ],
)
def test_rdma_devices_need_locked_memory(devices, memlock, state, part):
    check = check_rdma(devices, memlock)
    assert check.state == state
    assert part in check.found
    assert ("IPC_LOCK" in check.remedy) == (state == "warning")


@pytest.mark.parametrize(("limit", "state"), [(1024, "warning"), (1_048_576, "ok"), (-1, "ok")])
def test_limit_of_open_files_is_compared_with_what_the_head_sets(limit, state):
    assert check_open_files(limit).state == state
