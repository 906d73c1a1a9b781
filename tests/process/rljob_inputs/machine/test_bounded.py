"""Files that grow without end, as a stranger may write them: the check ends at its limits, and names the file."""

from __future__ import annotations

import gzip
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers  # noqa: F401 - so that no child imports it
from typer.testing import CliRunner

from rljob_api.errors import UserError
from rljob_cli.main import app
from rljob_inputs.findings import InputError
from rljob_inputs.machine import bounded as module
from rljob_inputs.machine.bounded import bounded, reading
from tests.support.model_folder import write_model
from tests.support.waiting import wait_for

JOB = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {{name: j}}
spec:
  model: {{source: model}}
  data: {{train: {{source: {data}}}}}
  rewards: [{{name: r, function: {{file: reward.py}}}}]
  rollout: {{sampling: {{maxTokens: 4}}}}
"""
DEEP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LONG = "{{ 'a' * 3000000000 }}"
ALIASES = "a0: &a0 {x: 1, y: 1}\n" + "".join(
    f"a{n}: &a{n} {{{', '.join(f'{key}: *a{n - 1}' for key in 'bcdefghi')}}}\n" for n in range(1, 9)
)


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lower one, beyond what this process has used."""
    monkeypatch.setattr(module, "_MEMORY_BYTES", psutil.Process().memory_info().rss + (1 << 30))


def write_rows(path: Path) -> None:
    path.write_text('{"prompt": "a", "answer": "b"}\n')


def write_zeros(path: Path) -> None:
    """2 GiB in 2 MB."""
    path.write_bytes(gzip.compress(bytes(1 << 26)) * 32)


def write_references(path: Path) -> None:
    """20 GB in 806 bytes: each row refers to one text."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000), pa.array(["a" * (1 << 20)]))
    pq.write_table(pa.table({"prompt": column, "answer": column}), path, compression="zstd")


def validate(folder: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth): return 1.0\n")
    (folder / "job.yaml").write_text(JOB.format(data=data))
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["validate", "--no-call", "job.yaml"])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    return " ".join(done.stderr.split())


@pytest.mark.parametrize(("template", "took"), [(DEEP, "4 s of CPU time"), (LONG, "more memory than there is")])
def test_chat_template_without_end_is_named(
    template: str, took: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CPU_SECONDS", 4)
    write_model(tmp_path / "model", chat_template=template)
    write_rows(tmp_path / "rows.jsonl")
    message = validate(tmp_path, "rows.jsonl", monkeypatch)
    assert "reading the chat template of " in message
    assert "model in chat_template.jinja" in message
    assert took in message
    assert "use another" in message


@pytest.mark.parametrize(("name", "write"), [("rows.jsonl.gz", write_zeros), ("rows.parquet", write_references)])
def test_data_that_expand_are_named(name: str, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model")
    write(tmp_path / name)
    assert (tmp_path / name).stat().st_size < 1 << 23
    assert f"{name} took more than 180 s of CPU time, or more memory" in validate(tmp_path, name, monkeypatch)


def test_settings_of_another_trainer_that_expand_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CPU_SECONDS", 4)
    (tmp_path / "verl.yaml").write_text(ALIASES)
    done = CliRunner().invoke(app, ["init", str(tmp_path / "job"), "--from", str(tmp_path / "verl.yaml")])
    assert done.exit_code == 2, done.output
    assert "verl.yaml: reading it took" in " ".join(done.stderr.split())


def test_results_and_errors_are_those_of_the_function() -> None:
    def work(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    assert bounded(work)({"a": [1]}) == {"a": [1]}
    with pytest.raises(InputError, match=r"^spec\.x: is wrong") as caught:
        bounded(work)(InputError("spec.x", "is wrong"))
    assert (caught.value.path, caught.value.message) == ("spec.x", "is wrong")
    with pytest.raises(KeyError) as defect:
        bounded(work)(KeyError("k"))
    assert "in work" in str(defect.value.__cause__), "the child's traceback"


def test_child_that_dies_is_named_with_what_it_read() -> None:
    def work() -> None:
        with reading("a"):
            pass
        with reading("b"):
            os._exit(3)

    with pytest.raises(UserError, match=r"^reading b took more than 180 s of CPU time, or more memory"):
        bounded(work)()


def test_no_child_is_left_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "Path", interrupt)
    before = set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt):
        bounded(signal.pause)()
    wait_for(lambda: set(psutil.Process().children()) <= before, "the end of the child")
