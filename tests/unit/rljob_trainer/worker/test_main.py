"""What the trainer Pod's program reads, and the Ray node that it starts."""

import signal

from rljob_api.manifest.job import RLJob
from rljob_trainer.ranks.ray_node import ENV_NUM_THREADS
from rljob_trainer.worker.main import Worker, build_command, build_environment, read_lengths
from tests.support.model_folder import write_model

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


def test_node_offers_one_rank_per_gpu_and_no_cpus():
    command = build_command("127.14.9.2", "127.14.9.1", 4, "/tmp/rljob-ray-1", 2_000_000_000)
    assert '--resources={"rljob-trainer": 4}' in command
    assert "--num-gpus=4" in command
    assert "--num-cpus=0" in command, "Ray would place its own work there"
    assert "--node-ip-address=127.14.9.2" in command
    assert "--address=127.14.9.1:6379" in command
    assert "--object-store-memory=2000000000" in command


def test_node_without_gpus_offers_one_rank():
    command = build_command("127.14.9.2", "127.14.9.1", 0, "/tmp/rljob-ray-1", 100_000_000)
    assert '--resources={"rljob-trainer": 1}' in command
    assert "--num-gpus=0" in command


def test_the_store_is_as_large_as_the_models_answers_need(tmp_path, caplog):
    job = RLJob.model_validate(JOB)
    folder = write_model(tmp_path, {"max_position_embeddings": 65536}, chat_template="<think>")
    found = read_lengths(job, str(folder))
    assert (found.job.spec.rollout.sampling.max_tokens, found.context_length) == (16384, 65536)
    unknown = read_lengths(job, str(tmp_path / "none"))
    assert unknown.job.spec.rollout.sampling.max_tokens == 512, "the head reports the model"
    assert "the model's settings are unknown: spec.model.source: folder" in caplog.text


def test_number_of_threads_is_passed_to_the_ranks():
    assert build_environment({"OMP_NUM_THREADS": "3"})[ENV_NUM_THREADS] == "3"
    assert ENV_NUM_THREADS not in build_environment({})


def test_compilers_of_many_ranks_leave_room_on_the_node_unless_the_user_decides():
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    assert build_environment({})[name] == "4"
    assert build_environment({name: "16"})[name] == "16"


def test_worker_without_engines_ends_by_a_signal_alone():
    worker = Worker("127.14.9.2", "127.14.9.1", 0, 100_000_000)
    assert not worker._stopping
    worker.stop(signal.SIGTERM, None)
    assert worker._stopping
