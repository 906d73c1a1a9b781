"""The rows of an env:// split in the run's folder: read once, kept from the first checkpoint on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job_sections import DataSource
from rljob_api.run.rows import read_record, record_file, rows_file
from rljob_api.wire.calls import RowsReply
from rljob_inputs.findings import InputError
from rljob_trainer.head import inputs as rows
from rljob_trainer.head.inputs import RowReading, Wanted, list_wanted
from rljob_trainer.history.disk import RunDisk


@dataclass
class Environment:
    """In the place of a RowsClient: pages of two rows at most."""

    num_rows: int | None = 5
    """None: without end."""
    tells_total: bool = True
    text: str = "row"
    environment: str = "the environment sums of skyrlGym"
    asked: list[tuple[int, int]] = field(default_factory=list)

    async def read(self, split: str, start: int, count: int = 1000) -> RowsReply:
        self.asked.append((start, count))
        end = start + min(count, 2) if self.num_rows is None else min(start + min(count, 2), self.num_rows)
        rows: list[dict[str, Any]] = [
            {"prompt": f"{self.text} {number}", "index": number} for number in range(start, end)
        ]
        return RowsReply(rows=rows, total=self.num_rows if self.tells_total else None, is_last=end == self.num_rows)


def build(folder: Path, num_rows: int | None = None, *, is_resumed: bool = False) -> RowReading:
    wanted = Wanted("train", "spec.data.train", num_rows)
    return RowReading(folder, wanted, RunDisk(folder), is_resumed=is_resumed)


def prompts(folder: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in rows_file(folder, "train").read_text().splitlines()]


async def test_rows_are_read_page_by_page_until_there_are_enough(tmp_path: Path) -> None:
    runner = Environment(None)
    await build(tmp_path, 5).read(runner)
    assert prompts(tmp_path) == [f"row {number}" for number in range(5)]
    assert runner.asked == [(0, 5), (2, 3), (4, 1)]
    record = read_record(tmp_path, "train")
    assert record is not None
    assert (record.num_rows, record.is_whole) == (5, False)


async def test_a_resumed_run_has_the_rows_that_it_began_with_and_asks_for_none(tmp_path: Path) -> None:
    await build(tmp_path).read(Environment())
    again = build(tmp_path, is_resumed=True)
    assert again.is_complete, "all five are there, and no environment is needed"
    other = Environment(text="other")
    more = build(tmp_path, 9, is_resumed=True)
    assert more.is_complete, "the split has no others"
    fresh = build(tmp_path)
    assert not fresh.is_complete, "without a checkpoint the run begins again, such as after a fix of the environment"
    await fresh.read(other)
    assert prompts(tmp_path)[0] == "other 0"


async def test_a_resumed_run_that_needs_more_rows_gets_these_alone(tmp_path: Path) -> None:
    await build(tmp_path, 3).read(Environment(None))
    runner, more = Environment(None, text="later"), build(tmp_path, 5, is_resumed=True)
    assert not more.is_complete
    await more.read(runner)
    assert runner.asked == [(3, 2)]
    assert prompts(tmp_path) == ["row 0", "row 1", "row 2", "later 3", "later 4"]


@pytest.mark.parametrize("damage", [b'{"prompt": "chan', None])
async def test_damaged_rows_are_read_again_if_they_are_still_the_same(tmp_path: Path, damage: bytes | None) -> None:
    await build(tmp_path).read(Environment())
    file = rows_file(tmp_path, "train")
    intact = file.read_bytes()
    file.unlink() if damage is None else file.write_bytes(damage)
    await build(tmp_path, is_resumed=True).read(Environment())
    assert file.read_bytes() == intact
    file.write_bytes(damage or b"")
    with pytest.raises(InputError, match=r"spec.data.train.source: env://train: .* is damaged, and the environment"):
        await build(tmp_path, is_resumed=True).read(Environment(text="other"))


async def test_a_damaged_record_is_no_reason_to_read_other_rows(tmp_path: Path) -> None:
    await build(tmp_path).read(Environment())
    record_file(tmp_path, "train").write_text('{"num_rows": 5')
    with pytest.raises(InputError, match=r"spec.data.train.source: env://train: .*train.json is damaged, .* restore"):
        build(tmp_path, is_resumed=True)


async def test_split_without_rows_is_a_user_error_with_field_and_environment(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        await build(tmp_path).read(Environment(0))
    assert str(caught.value) == (
        "spec.data.train.source: env://train: the environment sums of skyrlGym has no rows in this split; name another "
        "split, or a file"
    )


async def test_rows_without_end_need_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_UNKNOWN_ROWS", 10)
    with pytest.raises(InputError, match=r"has more than 10 rows, and perhaps no end; set spec.data.train.limit to"):
        await build(tmp_path).read(Environment(None))
    await build(tmp_path).read(Environment(12))
    assert len(prompts(tmp_path)) == 12, "an environment that knows its rows has no such limit"


@pytest.mark.parametrize("kind", [UserError, TransientError])
async def test_errors_of_the_runner_keep_their_kind_and_get_the_field(tmp_path: Path, kind: type[Exception]) -> None:
    class Failing(Environment):
        async def read(self, split: str, start: int, count: int = 1000) -> RowsReply:
            raise kind("it gave no rows")

    with pytest.raises(kind, match=r"^spec.data.train.source: env://train: it gave no rows$"):
        await build(tmp_path).read(Failing())


def test_sources_of_one_split_share_its_rows() -> None:
    source = {"source": "env://train"}
    sources = {
        "spec.data.train": DataSource.model_validate({**source, "offset": 10, "limit": 90}),
        "spec.data.eval": DataSource.model_validate({**source, "limit": 10}),
        "spec.data.mix[0]": DataSource.model_validate({"source": "env://hard"}),
    }
    assert list_wanted(sources) == [Wanted("train", "spec.data.train", 100), Wanted("hard", "spec.data.mix[0]", None)]
    sources["spec.data.eval"] = DataSource.model_validate(source)
    assert list_wanted(sources)[0] == Wanted("train", "spec.data.eval", None)
