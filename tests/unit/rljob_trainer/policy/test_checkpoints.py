"""The configuration that an export has."""

import torch
from transformers import Qwen3_5Config

from rljob_trainer.policy.checkpoints import set_dtype


def test_all_parts_of_an_exported_configuration_have_the_type_of_its_weights():
    config = Qwen3_5Config()
    set_dtype(config, torch.bfloat16)
    written = config.to_dict()
    assert [part["dtype"] for part in (written, written["text_config"], written["vision_config"])] == ["bfloat16"] * 3
