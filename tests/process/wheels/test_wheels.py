"""RLJob's wheels, installed as users do: by `uv tool install`, into an empty environment, with an empty HOME.

The wheels come from a folder in place of an index. Other packages are those of uv.lock, from uv's cache or the index.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rljob_inputs.machine.installation import REQUIREMENTS
from tests.paths import DATA, EXAMPLES, ROOT
from tests.support.model_folder import write_model

MAX_BASE_BYTES = 150_000_000
DEVELOPMENT = ("cosmic_ray", "mypy", "playwright", "pytest", "hypothesis", "rljob_cluster", "rljob_operator")
_INDEX_VARIABLES = ("UV_INDEX", "UV_DEFAULT_INDEX", "SSL_CERT")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A new folder for each run: uv's cache knows a wheel by its path and its version."""
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run(["uv", "build", "--quiet", "--wheel", "--all-packages", "--out-dir", folder], cwd=ROOT, check=True)
    return folder


@dataclass(frozen=True)
class Installation:
    home: Path
    environment: dict[str, str]
    """A shell's, which has nothing but the tools of the system, uv, and what was installed."""

    @property
    def site(self) -> Path:
        return next(self.home.glob(".local/share/uv/tools/rljob/lib/python3*/site-packages"))

    def run(self, *arguments, code=0):
        """Run a command in the folder `work`; return its stdout, or what it prints on stderr if it must fail."""
        done = subprocess.run(
            list(map(str, arguments)),
            cwd=self.home / "work",
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr if code else done.stdout

    def has(self, module):
        return (self.site / module).exists()


def install(home, wheels, requirement="rljob"):
    """Install a requirement by uv, with the versions of the lock."""
    uv = Path(shutil.which("uv")).parent
    cache = subprocess.run(["uv", "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
    environment = {
        "HOME": str(home),
        "PATH": f"{home}/.local/bin:{uv}:/usr/bin:/bin",
        "UV_CACHE_DIR": cache,
        "UV_FIND_LINKS": str(wheels),
        "UV_PYTHON": f"{sys.version_info.major}.{sys.version_info.minor}",
        "CUDA_VISIBLE_DEVICES": "",
        **{name: value for name, value in os.environ.items() if name.startswith(_INDEX_VARIABLES)},
    }
    (home / "work").mkdir(parents=True)
    installed = Installation(home, environment)
    files = ("--constraints", REQUIREMENTS / "cpu.txt", "--overrides", REQUIREMENTS / "overrides.txt")
    installed.run("uv", "tool", "install", "--quiet", requirement, *files)
    return installed


@pytest.fixture(scope="module")
def base(tmp_path_factory, wheels):
    return install(tmp_path_factory.mktemp("base") / "home", wheels)


@pytest.fixture(scope="module")
def with_data(tmp_path_factory, wheels):
    return install(tmp_path_factory.mktemp("data") / "home", wheels, "rljob[data]")


def count_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")


def test_base_is_small_and_has_nothing_of_the_developers(base):
    assert count_bytes(base.site) < MAX_BASE_BYTES
    assert [name for name in (*DEVELOPMENT, "kubernetes_validate", "pyarrow", "numpy") if base.has(name)] == []


def test_base_writes_checks_renders_and_plans_a_job_without_its_rows(base):
    write_model(base.home / "work" / "model", {"max_position_embeddings": 2048})
    base.run("rljob", "init", "job", "--model", "./model")
    assert "uv tool install --python " in base.run("rljob", "plan", "job/rljob.yaml")
    verdict = base.run("rljob", "validate", "job/rljob.yaml")
    assert "RLJob job is valid" in verdict
    assert re.search(
        r"no row was read, and no function was called: run `uv tool install [^`]+ 'rljob\[data\]==[^`]+'`",
        verdict,
    )
    assert "kind: StatefulSet" in base.run("rljob", "validate", "--render", "job/rljob.yaml")
    assert "kind: RLJob" in base.run("kubectl-rljob", "submit", "--dry-run", "job/rljob.yaml")
    assert "rljob-api" in base.run("rljob", "--version")


def test_base_looks_for_a_cluster(base):
    assert "no kubeconfig names a cluster" in base.run("kubectl-rljob", "explain", "job", code=2)


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("test-reward JOB --completion 4", "data"),
        ("report job", "data"),
        ("run JOB", "cpu"),
    ],
)
def test_a_command_without_its_extra_names_it_with_the_command(base, command, extra):
    job = str(EXAMPLES / "quickstart" / "rljob.yaml")
    run = base.home / "work/runs/job"
    run.mkdir(parents=True, exist_ok=True)
    shutil.copy(job, run / "job.yaml")
    message = base.run("rljob", *command.replace("JOB", job).split(), code=2)
    assert f"needs the extra {extra} (" in message
    [install] = re.findall(r"run `([^`]+)`", message)
    words = shlex.split(install)
    assert words[:5] == ["uv", "tool", "install", "--python", "3.11"]
    assert any(word.startswith(f"rljob[{extra}]==") for word in words)
    files = [Path(word) for word in shlex.split(install) if word.endswith(".txt")]
    assert [path.name for path in files] == ([] if extra == "data" else ["cpu.txt", "overrides.txt"])
    assert all(path.is_file() for path in files)


def test_a_parquet_file_needs_the_extra_that_reads_it(base):
    (base.home / "work" / "rows.parquet").write_bytes(b"PAR1")
    message = base.run("rljob", "init", "parquet", "--data", "rows.parquet", code=2)
    assert "pyarrow is not installed; run `uv tool install --python " in message


def test_rendering_needs_no_module_that_only_unix_has(base):
    program = "import sys; sys.modules['fcntl'] = None; from rljob_cli.main import main; main()"
    python = next(base.home.glob(".local/share/uv/tools/rljob/bin/python"))
    assert "kind: Job" in base.run(
        python, "-c", program, "validate", "--render", EXAMPLES / "quickstart" / "rljob.yaml"
    )


def test_data_reads_rows_calls_the_reward_and_writes_a_report(with_data):
    assert not with_data.has("torch")
    work = with_data.home / "work"
    write_model(work / "model", {"max_position_embeddings": 2048})
    with_data.run("rljob", "init", "job", "--model", "./model")
    [verdict] = json.loads(with_data.run("rljob", "validate", "job/rljob.yaml", "-o", "json"))["files"]
    assert verdict["valid"]
    assert verdict["prompt_lengths"][0]["num_rows"] == 100
    assert verdict["rewards"][0]["result"]["score"] == 1.0
    scored = with_data.run("rljob", "test-reward", "job/rljob.yaml", "--completion", "4", "--answer", "4")
    assert "exact" in scored
    shutil.copytree(DATA / "report", work / "run")
    assert with_data.run("rljob", "report", "run").strip().endswith("report.html")


@pytest.mark.slow
def test_the_printed_command_adds_what_a_run_needs(tmp_path, wheels):
    """From the base installation, by the command that `rljob run` prints, to a trained model."""
    installed = install(tmp_path / "home", wheels)
    for folder in ("examples/tiny", "examples/quickstart/data", ".models/tiny-qwen3"):
        shutil.copytree(ROOT / folder, installed.home / "work" / folder)
    job = "examples/tiny/rljob.yaml"
    [command] = re.findall(r"run `([^`]+)`", installed.run("rljob", "run", job, code=2))
    installed.run(*shlex.split(command))
    assert [name for name in DEVELOPMENT if installed.has(name)] == []
    result = json.loads(installed.run("rljob", "run", job, "-o", "json").splitlines()[-1])
    assert result["phase"] == "Succeeded"
