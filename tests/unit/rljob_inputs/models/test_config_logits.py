"""Settings of a family that change its logits."""

import pytest

from rljob_inputs.models.config import LogitTransform, find_logit_transform


@pytest.mark.parametrize(
    ("config", "transform"),
    [
        ({}, LogitTransform()),
        ({"logit_scale": None, "final_logit_softcapping": None}, LogitTransform()),
        ({"logit_scale": 0.25}, LogitTransform(0.25)),
        ({"logits_scaling": 8}, LogitTransform(0.125)),
        ({"logits_scaling": 8, "model_type": "hyperclovax"}, LogitTransform(8.0)),
        ({"lm_head_multiplier": 0.5}, LogitTransform(0.5)),
        ({"final_logit_softcapping": 30.0}, LogitTransform(1.0, 30.0)),
        ({"output_multiplier": 2.0, "final_logit_softcapping": 30.0}, LogitTransform(2.0, 30.0)),
    ],
)
def test_settings_of_each_family(config, transform):
    assert find_logit_transform(config) == transform
