"""`rljob export` from the arguments to the folder. The export itself is that of the trainer's tests."""

import json
import shutil

import pytest
import yaml
from typer.testing import CliRunner

from rljob_api.run.folder import FILE_COMPLETE, FILE_JOB, FILE_SUMMARY, checkpoint_folder
from rljob_cli.export import command, from_cluster
from rljob_cli.main import app
from tests.paths import DATA
from tests.support.hub import run_hub


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run that was stopped after step 4: it has no summary."""
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(DATA / "report", tmp_path / "runs" / "letters")
    (folder / FILE_SUMMARY).unlink()
    for step in (2, 4):
        checkpoint_folder(folder, step).mkdir(parents=True)
        (checkpoint_folder(folder, step) / FILE_COMPLETE).touch()
    return folder


@pytest.fixture
def exports(monkeypatch):
    """The exports that were asked for; each writes one file."""
    asked = []

    def export_step(run, step, to, given):
        asked.append((run, step))
        to.mkdir()
        (to / "config.json").write_text("{}")

    monkeypatch.setattr(command, "export_step", export_step)
    return asked


def call(*arguments):
    return CliRunner().invoke(app, ["export", *arguments])


def test_last_checkpoint_of_a_stopped_run_is_exported_with_its_card(run, exports, tmp_path):
    done = call("letters", "--to", "model")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path}/model\nserve it with: vllm serve {tmp_path}/model\n"
    assert exports == [(run, 4)]
    card = (tmp_path / "model" / "README.md").read_text()
    assert "# letters, step 4" in card
    assert "\n| 5 |" not in card, "later steps are not of this model"


def test_card_has_the_defaults_of_a_job_that_sets_little(run, exports, tmp_path):
    job = yaml.safe_load((run / FILE_JOB).read_text())
    for section in ("algorithm", "schedule", "rollout"):
        job["spec"].pop(section, None)
    (run / FILE_JOB).write_text(yaml.safe_dump(job))
    assert call("letters", "--to", "model").exit_code == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| samples of a step | 64 prompts, 8 samples each |" in card
    assert "None" not in card


def test_json_has_the_folder_and_the_step(run, exports, tmp_path):
    done = call(str(run), "--step", "2", "--to", "model", "-o", "json")
    expected = {"run": str(run), "step": 2, "folder": f"{tmp_path}/model", "serve": f"vllm serve {tmp_path}/model"}
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize("has_export", [True, False])
def test_model_of_a_job_in_a_cluster_is_written_from_the_copy(run, exports, tmp_path, monkeypatch, has_export):
    asked = []

    def with_model(target, job, step, given, parent, use):
        asked.append((target.namespace, job, step, parent))
        copy = shutil.copytree(run, parent / ".export-1" / job)
        export = copy / "exports" / "step-000004"
        export.mkdir(parents=True)
        (export / "config.json").write_text("of the job")
        return use(copy, 4, export if has_export else None)

    monkeypatch.setattr("rljob_cli.cluster.commands.on_cluster", lambda command: with_model)
    done = call("sums", "-n", "team", "--to", "out/model", "-o", "json")
    assert done.exit_code == 0, done.output
    assert asked == [("team", "sums", "last", tmp_path / "out")]
    found = json.loads(done.stdout)
    assert (found["run"], found["step"], found["folder"]) == ("sums", 4, f"{tmp_path}/out/model")
    assert (tmp_path / "out" / "model" / "config.json").read_text() == ("of the job" if has_export else "{}")
    assert "# letters, step 4" in (tmp_path / "out" / "model" / "README.md").read_text()
    assert len(exports) == (not has_export)


def test_place_of_a_job_in_a_cluster_is_checked_before_anything_is_copied(run, exports, monkeypatch):
    monkeypatch.setattr(from_cluster, "use_model", lambda *arguments: pytest.fail("copies"))
    done = call("sums", "-n", "team", "--to", "runs")
    assert done.exit_code == 2
    assert "--to runs: exists" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["letters", "--step", "final", "--to", "x"], "--step final: must be the number of a step, last or best"),
        (["letters", "--to", "runs"], "--to runs: exists; choose a new folder"),
        (["letters", "--step", "best", "--to", "x"], "has no best.json: set evaluation.best in the job"),
        (["other", "--to", "x"], "runs/other: run not found"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_remedy(run, exports, arguments, message, tmp_path):
    done = call(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert exports == []
    assert not (tmp_path / "x").exists()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with run_hub(tmp_path / "hub") as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", "hf_write")
        yield running


def test_model_is_published_on_the_hub_and_no_copy_stays(run, exports, hub):
    done = call("letters", "--to", "hf://org/letters")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{hub.url}/org/letters\nserve it with: vllm serve org/letters\n"
    published = hub.folder / "models" / "org" / "letters"
    assert (published / "config.json").read_text() == "{}"
    assert "# letters, step 4" in (published / "README.md").read_text()
    assert not list(run.glob(".export-*"))


def test_place_that_refuses_the_model_says_so_before_it_is_built(run, exports, hub):
    hub.add("models/org/letters")
    done = call("letters", "--to", "hf://org/letters")
    assert done.exit_code == 2
    assert "hf://org/letters: exists and is public" in done.stderr
    assert exports == []


def test_model_goes_to_object_storage(run, exports, monkeypatch):
    asked, written = [], {}
    monkeypatch.setattr(command, "require_empty", lambda url, access: asked.append((url, access.endpoint)))

    def upload(folder, url, access, *, last, report):
        written.update({path.name: last for path in folder.iterdir()}, url=url)

    monkeypatch.setattr(command, "upload_folder", upload)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://storage:9000")
    done = call("letters", "--to", "s3://bucket/letters/", "-o", "json")
    assert done.exit_code == 0, done.output
    expected = {"run": str(run), "step": 4, "folder": "s3://bucket/letters", "serve": ""}
    assert json.loads(done.stdout) == expected
    assert asked == [("s3://bucket/letters", "http://storage:9000")]
    assert written == {"config.json": ("config.json",), "README.md": ("config.json",), "url": "s3://bucket/letters"}


@pytest.mark.parametrize("to", ["ftp://host/x", "hf://name", "pvc://claim/x", "env://train"])
def test_other_places_are_refused(run, exports, to):
    done = call("letters", "--to", to)
    assert done.exit_code == 2
    assert f"--to {to}: must be a new folder, s3://bucket/path or hf://org/name" in done.stderr
    assert call("letters", "--to", "model", "--public").exit_code == 2
    assert exports == []
