"""Where weight files are put: in memory if they fit, else on disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rljob_api.errors import UserError
from rljob_trainer.weights import mapped

GIB = 1 << 30


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free bytes of `memory` and `disk`, which the test may change."""
    free = {"memory": 64 * GIB, "disk": 500 * GIB}
    for name in free:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(mapped, "_SHARED_MEMORY", tmp_path / "memory")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "disk"))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free[folder.name]))
    return free


@pytest.mark.parametrize(
    ("in_memory", "num_bytes", "expected"),
    [
        (64 * GIB, 45 * GIB, "memory"),
        (64 * GIB, 195 * GIB, "disk"),  # three files of 32B
        (64 << 20, 1 << 20, "disk"),  # a container without a volume
    ],
)
def test_files_are_in_memory_if_they_fit(places: dict[str, int], in_memory: int, num_bytes: int, expected: str) -> None:
    places["memory"] = in_memory
    assert mapped.open_scratch_folder(num_bytes).parent.name == expected


def test_no_room_names_the_size_and_what_each_place_has(places: dict[str, int]) -> None:
    places |= {"memory": 8 * GIB, "disk": 20 * GIB}
    with pytest.raises(UserError, match=r"need 42.0 GiB .*memory has 8.0, .*disk has 20.0; raise resources.limits"):
        mapped.open_scratch_folder(42 * GIB)


def test_folder_of_a_killed_process_is_deleted(places: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "memory" / "rljob-weights-dead").mkdir()
    first, second = mapped.open_scratch_folder(0), mapped.open_scratch_folder(0)
    assert set((tmp_path / "memory").iterdir()) == {first, second}
