"""The file of a chat template: read with the job, submitted as text."""

from __future__ import annotations

import pytest
import yaml
from typer.testing import CliRunner

from rljob_cli.check.jobfile import load_partial
from rljob_cli.main import app
from tests.support.model_folder import write_model

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: j}
spec:
  model:
    source: ./model
    chatTemplate: {file: own.jinja}
  data: {train: {source: train.jsonl}}
  rewards: [{name: r, function: {inline: "def compute_score(completion): return 1.0"}}]
"""
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}Ä:"


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def rljob(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return done.exit_code, done.output


def print_objects(*arguments):
    """Return what the command prints on stdout, without warnings."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_programs_get_the_text(path):
    file = load_partial(path)
    assert file.job.spec.model.chat_template.inline == TEMPLATE
    assert file.job.spec.model.chat_template.file is None
    assert file.relative["spec.model.chatTemplate.file"] == "own.jinja"
    documents = yaml.safe_load_all(print_objects("validate", "--render", path))
    (config,) = [each for each in documents if "job.yaml" in each.get("data", {})]
    model = yaml.safe_load(config["data"]["job.yaml"])["spec"]["model"]
    assert model["chatTemplate"] == {"inline": TEMPLATE}


def test_a_cluster_gets_the_text_by_submit(path):
    code, output = rljob("validate", path, "--no-call")
    assert code == 0
    assert "takes ./model, train.jsonl, own.jinja along" in output
    code, output = rljob("validate", path, "--no-call", "--cluster")
    assert code == 2
    assert (
        "spec.model.chatTemplate.file is a path on this machine, which no cluster has, got own.jinja; `rljob submit` "
        "takes it along, or use chatTemplate.inline"
    ) in output
    path.write_text(JOB.replace("./model", "pvc://models/m"))
    *_, job = yaml.safe_load_all(print_objects("submit", path, "--dry-run", "--kubeconfig", "none"))
    assert job["spec"]["model"]["chatTemplate"] == {"inline": TEMPLATE}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "own.jinja not found; did you mean owm.jinja?"),
        (b"\xff", "cannot be read: 'utf-8' codec"),
        (b"", "must have 1 to 65536 characters, got 0"),
        (b"a" * 65537, "must have 1 to 65536 characters, got 65537"),
        (b"{% if %}", "spec.model.chatTemplate is not a Jinja template: line 1"),
    ],
)
def test_an_unusable_file_is_reported_at_its_line(path, content, message):
    file = path.parent / "own.jinja"
    if content is None:
        file.rename(path.parent / "owm.jinja")
    else:
        file.write_bytes(content)
    code, output = rljob("validate", path, "--no-call")
    assert code == 2
    (line,) = output.splitlines()
    assert line.startswith(f"{path}:7: spec.model.chatTemplate")
    assert message in line
