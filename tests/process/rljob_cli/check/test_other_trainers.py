"""`rljob init --from` expands a script of verl by bash, and runs none of its commands."""

import json

import pytest
from typer.testing import CliRunner

from rljob_cli.check import other_trainers
from rljob_cli.main import app

SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
cd /nowhere
touch {folder}/touched > {folder}/redirected
DEVICE=${{DEVICE:-$(python3 -c 'import nothing' 2>/dev/null && echo npu || echo gpu)}}
case "$DEVICE" in
    gpu) tp=${{tp:-2}} ;;
    npu) tp=16 ;;
esac
[ -f missing ] || exit 1
DATA=(data.train_files="['{folder}/a.parquet', '{folder}/b.parquet']" data.train_batch_size=$((4 * 16)))
EXTRA=()
[[ $tp > 1 ]] && EXTRA+=(+actor_rollout_ref.rollout.n=5)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo "${{DATA[@]}}" "${{EXTRA[@]}}" \\
    actor_rollout_ref.model.path=${{MODEL:-org/name}} trainer.nnodes=$(nvidia-smi -L | wc -l) \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=$tp "$@" > {folder}/log 2>&1
kill -9 $$
"""


def test_script_is_expanded_and_nothing_of_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DEVICE", raising=False)  # the script reads it
    (tmp_path / "run.sh").write_text(SCRIPT.format(folder=tmp_path))
    done = CliRunner().invoke(app, ["init", "job", "--from", "run.sh", "-o", "json"])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "run.sh"]
    text = (tmp_path / "job" / "rljob.yaml").read_text()
    assert "source: hf://org/name" in text
    assert "promptsPerStep: 64" in text
    assert "groupSize: 5" in text
    assert "gpusPerReplica: 2" in text
    assert text.count(".parquet") == 2
    [entry] = [each for each in json.loads(done.stdout)["left"] if each["setting"] == "trainer.nnodes"]
    assert entry["why"].startswith("computed by the script; set it")


def test_what_programs_and_unset_variables_give_is_listed_and_reaches_no_field(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("N_NODES", raising=False)
    (tmp_path / "run.sh").write_text(
        "for lr in 1e-6 2e-6; do for i in $(seq 2); do\n"
        "python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.model.path=$(dirname $0)/m \\\n"
        "  trainer.n_gpus_per_node=$(nvidia-smi -L | wc -l) trainer.nnodes=$((N_NODES * 2)) \\\n"
        "  actor_rollout_ref.actor.optim.lr=$lr data.prompt_key='${hydra:x}'\n"
        "done; done\n"
    )
    done = CliRunner().invoke(app, ["init", "job", "--from", "run.sh", "-o", "json"])
    computed = [each["setting"] for each in json.loads(done.stdout)["left"] if "computed" in each["why"]]
    assert sorted(computed) == [
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.model.path",
        "data.prompt_key",
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
    ]
    text = (tmp_path / "job" / "rljob.yaml").read_text()
    assert "$" not in text
    assert "gpusPerReplica: 8" in text, "verl's default, and no job for CPUs"
    assert "promptsPerStep: 64" in text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("set -e\n: ${1:?pass the model}\npython3 -m verl data.train_batch_size=64\n", "line 2: 1: pass the model"),
        ("while true; do nvidia-smi; done\n", "does not end within"),
    ],
)
def test_script_that_stops_early_is_refused_with_the_line(tmp_path, monkeypatch, text, why):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(other_trainers, "_SECONDS", 0.5)
    (tmp_path / "run.sh").write_text(text)
    done = CliRunner().invoke(app, ["init", "job", "--from", "run.sh"])
    assert (done.exit_code, why in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "line",
    [
        "export PATH=/usr/bin:$PATH; touch escaped",
        "PATH=/usr/bin touch escaped",
        "unset PATH; declare PATH=/usr/bin; touch escaped",
        "f() { local PATH=/usr/bin; touch escaped; }; f",
        "declare -n P=PATH; P=/usr/bin; touch escaped",
        "builtin set +r; /usr/bin/touch escaped",
        "command -p touch escaped",
    ],
)
def test_no_line_of_a_script_starts_a_program(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(f"{line}\npython3 -m verl.trainer.main_ppo data.train_batch_size=64\n")
    CliRunner().invoke(app, ["init", "job", "--from", "run.sh"])
    assert not (tmp_path / "escaped").exists()
