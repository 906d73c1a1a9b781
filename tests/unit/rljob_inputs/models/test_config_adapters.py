"""Whether rollouts load adapters, by the model and the device."""

import pytest

from rljob_api.manifest.job import RLJobSpec
from rljob_inputs.models.config import find_adapter_obstacle, publishes_adapter

QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"]}
ZAMBA2 = {"architectures": ["Zamba2ForCausalLM"]}
UNKNOWN = {"architectures": ["SomeForCausalLM"]}


def build_spec(lora, gpus):
    return RLJobSpec.model_validate(
        {
            "model": {"source": "/m"},
            "data": {"train": {"source": "/t"}},
            "rewards": [{"name": "r", "function": {"inline": "x"}}],
            "trainer": {"lora": lora, "gpusPerReplica": gpus},
            "rollout": {"gpusPerReplica": gpus},
        }
    )


@pytest.mark.parametrize(
    ("lora", "gpus", "config", "publishes"),
    [
        (None, 0, QWEN3, False),
        ({}, 0, QWEN3, True),
        ({"publish": "merged"}, 0, QWEN3, False),
        ({}, 0, MIXTURE, False),
        ({}, 1, MIXTURE, True),
        ({}, 1, ZAMBA2, False),
        ({"publish": "adapter"}, 1, ZAMBA2, True),
        ({}, 1, UNKNOWN, False),
        ({}, 1, {}, False),
    ],
)
def test_adapters_are_the_default_where_vllm_can_add_them(lora, gpus, config, publishes):
    assert publishes_adapter(build_spec(lora, gpus), config) is publishes


def test_obstacles_name_the_model_and_the_device():
    assert find_adapter_obstacle(build_spec({}, 1), ZAMBA2) == "vLLM cannot add adapters to Zamba2ForCausalLM"
    assert find_adapter_obstacle(build_spec({}, 0), MIXTURE).endswith("Qwen3MoeForCausalLM on CPUs")
    assert not find_adapter_obstacle(build_spec({}, 1), MIXTURE)
