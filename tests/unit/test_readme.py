"""Every block of the README is covered: by a check here, or by a test that runs it (see KINDS and COMMANDS)."""

import re

import pytest

from rljob_api.read.load import load_manifests
from rljob_api.run.summaries import RunSummary
from rljob_cli.check.device_fields import LARGER_MODELS
from rljob_cli.main import app
from rljob_cli.run.summary import summary_lines
from rljob_core.children import build_children
from rljob_core.defaults import DEFAULTS
from rljob_core.plan.validate import find_problems
from rljob_inputs.memory.plan import ModelFacts, Question
from rljob_inputs.memory.sharing import share_gpus
from rljob_inputs.models.defaults import resolve_job
from tests.paths import CHART, ROOT
from tests.support import fast_yaml
from tests.support.readme import read_blocks, read_commands, read_smallest_job

LANGUAGES = ["bash", "text", "bash", "bash", "yaml", "bash"]
"""In order."""


def check_make(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), "CI runs make demo and make test"


def check_rljob(command, *_):
    """tests/process/rljob_cli/test_readme.py and tests/integration/test_hub_real.py run them."""
    assert command in ("init", "test-reward", "test-agent", "validate", "run")


def check_activate(path):
    assert path == ".venv/bin/activate", "make install creates it"


def check_editor(path):
    assert path.startswith(("myjob/", "myagent/")), "tests/process/rljob_cli/test_readme.py finds it there"


def check_helm(verb, _, chart, *__):
    assert verb == "install"
    assert ROOT / chart == CHART, "tests/process/charts installs it"


def check_kubectl(verb, *arguments):
    if verb == "rljob":
        assert arguments[0] in [command.name or command.callback.__name__ for command in app.registered_commands]
    elif verb == "get":
        crd = fast_yaml.load((ROOT / "crds" / "rljobs.rljob.dev.yaml").read_text())
        assert arguments[0] == crd["spec"]["names"]["singular"]
    elif verb in ("create", "config"):  # of kubectl alone
        known = (("create", "namespace"), ("config", "set-context", "--current", "--namespace"))
        assert (verb, *arguments[:-1]) in known
    else:
        assert (verb, arguments) == ("apply", ("-f", "rljob.yaml")), "e2e/test_hub.py applies the smallest job"


COMMANDS = {
    "make": check_make,
    "rljob": check_rljob,
    "source": check_activate,
    "$EDITOR": check_editor,
    "helm": check_helm,
    "kubectl": check_kubectl,
}


def test_every_block_is_of_a_kind_that_is_checked():
    assert [block.language for block in read_blocks()] == LANGUAGES


@pytest.mark.parametrize("command", read_commands(), ids=" ".join)
def test_command_is_one_that_is_checked(command):
    COMMANDS[command[0]](*command[1:])


def test_smallest_job_is_valid_for_a_cluster_and_renders():
    (job,) = load_manifests(read_smallest_job(), "README.md")
    assert not find_problems(job)
    kinds = [child["kind"] for child in build_children(job, "token", DEFAULTS)]
    assert {"Job", "StatefulSet", "Deployment", "Service", "NetworkPolicy", "Secret", "ConfigMap"} <= set(kinds)


def test_smallest_job_runs_on_one_gpu_as_the_readme_says():
    (job,) = load_manifests(read_smallest_job(), "README.md")
    source = job.spec.model.source
    models = {source: ModelFacts(LARGER_MODELS[source])}
    sharing = share_gpus(Question(resolve_job(job, None), models, 16_000 * 2**20, num_gpus=1))
    assert sharing.fields == {"rollout.placement": "trainer"}, sharing
    assert "here from 16 GB on" in (ROOT / "README.md").read_text()


def test_output_of_the_demo_has_the_lines_of_the_program():
    (text,) = (block.text for block in read_blocks() if block.language == "text")
    shown = [tuple(cell.rstrip() for cell in row) for row in re.findall(r"^│ (.*?)│ (.*?)│$", text, re.M)]
    exact, last = (0.008, 0.570), (0.391, 0.570)
    summary = {
        "phase": "Succeeded",
        "name": "quickstart",
        "steps": 18,
        "total_steps": 18,
        "wall_seconds": 0.0,
        "evaluations": [
            {"step": 18 * i, "accuracy": exact[i], "means": {"exact": exact[i], "last": last[i]}} for i in (0, 1)
        ],
        "rewards_served": 1408,
        "pause_seconds": 1.161,
        "transfer_seconds": 0.001,
        "weight_digests": {"trainer": "a", "rollout": "a"},
    }
    assert shown
    lines = summary_lines(RunSummary.model_validate(summary))
    assert [line for line in lines if line in shown] == shown
