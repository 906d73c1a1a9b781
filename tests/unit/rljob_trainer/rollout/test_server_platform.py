"""vLLM's device against the spec's, for each build of vLLM on nodes with and without GPUs."""

from dataclasses import dataclass

import pytest

from rljob_api.errors import UserError
from rljob_trainer.devices import CudaFacts
from rljob_trainer.rollout import server
from rljob_trainer.rollout.server import check_platform


@dataclass
class Platform:
    cpu: bool = False
    cuda: bool = False

    def is_cpu(self):
        return self.cpu

    def is_cuda_alike(self):
        return self.cuda


CPU_BUILD, CUDA_BUILD, CUDA_BUILD_WITHOUT_GPU = Platform(cpu=True), Platform(cuda=True), Platform()


@pytest.mark.parametrize(("num_gpus", "found"), [(0, CPU_BUILD), (1, CUDA_BUILD)])
def test_build_for_the_device_of_the_spec_is_accepted(num_gpus, found):
    check_platform(num_gpus, found)


@pytest.mark.parametrize(
    ("num_gpus", "found", "message"),
    [
        (2, CPU_BUILD, "gpusPerReplica is 2, and vLLM of this image is for CPUs only.*EXTRA=gpu"),
        (0, CUDA_BUILD, "gpusPerReplica is 0, and vLLM of this image needs a GPU.*EXTRA=cpu"),
        (0, CUDA_BUILD_WITHOUT_GPU, "gpusPerReplica is 0, and vLLM of this image needs a GPU.*EXTRA=cpu"),
        (2, CUDA_BUILD_WITHOUT_GPU, "gpusPerReplica is 2, and torch finds no GPU.*no driver is visible"),
    ],
)
def test_other_device_is_a_user_error(monkeypatch, num_gpus, found, message):
    monkeypatch.setattr(server, "read_cuda_facts", lambda: CudaFacts("2.13.0", "13.0", None, "no driver"))
    with pytest.raises(UserError, match=rf"^spec\.rollout\.{message}"):
        check_platform(num_gpus, found)
