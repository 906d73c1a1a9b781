"""`rljob init --from` expands a script of verl by bash, and runs none of its commands."""

import json

import pytest
from typer.testing import CliRunner

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
    assert entry["why"] == "FILE computes it"


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
