"""What the trainer Pod's program reads, and the Ray node that it starts."""

import pytest
import yaml

from rljob_api.errors import UserError
from rljob_trainer.ranks.ray_node import ENV_NUM_THREADS
from rljob_trainer.worker.main import build_command, build_environment, read_environment

JOB = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "pods"},
    "spec": {
        "model": {"source": "/model"},
        "data": {"train": {"source": "/data.jsonl"}},
        "rewards": [{"name": "r", "function": {"inline": "def compute_score(): ..."}}],
        "trainer": {"replicas": 2, "gpusPerReplica": 4},
    },
}


@pytest.fixture
def variables(tmp_path):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    return {"RLJOB_POD_IP": "127.14.9.2", "RLJOB_HEAD": "head", "RLJOB_JOB_FILE": str(tmp_path / "job.yaml")}


def test_node_offers_one_rank_per_gpu_and_no_cpus(variables, tmp_path):
    command = build_command(read_environment(variables), "127.14.9.1", tmp_path)
    assert '--resources={"rljob-trainer": 4}' in command
    assert "--num-gpus=4" in command
    assert "--num-cpus=0" in command, "Ray would place its own work there"
    assert "--node-ip-address=127.14.9.2" in command
    assert "--address=127.14.9.1:6379" in command


def test_missing_variable_is_a_user_error(variables):
    with pytest.raises(UserError, match="RLJOB_HEAD must be set"):
        read_environment({**variables, "RLJOB_HEAD": ""})


def test_number_of_threads_is_passed_to_the_ranks():
    assert build_environment({"OMP_NUM_THREADS": "3"})[ENV_NUM_THREADS] == "3"
    assert ENV_NUM_THREADS not in build_environment({})
