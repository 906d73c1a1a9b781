import json
import re

import pytest

from rljob_api.generate import crd
from rljob_api.generate.crd import shorten_repeated
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel

ANNOTATION_LIMIT_BYTES = 256 * 1024
"""The API server's limit of all annotations of an object."""
LONG = "Maximum failures, e.g. 6; one more fails. Rollouts count per Pod."
FIRST = "Maximum failures, e.g. 6; one more fails."


def measure_annotation(manifest):
    """Its bytes in the annotation of `kubectl apply`: compact JSON, in which Go escapes three characters."""
    text = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False)
    return len(re.sub("[<>&]", r"\\u0000", text).encode())


def field(description, **more):
    return {"type": "object", "description": description} | more


@pytest.mark.parametrize("model", [RLJob, RewardModel])
def test_plain_kubectl_apply_has_room_to_grow(model):
    num_bytes = measure_annotation(crd.build_crd(model))
    assert num_bytes < 0.94 * ANNOTATION_LIMIT_BYTES, "shorten the docstrings of types that many fields have"


def test_a_repeated_description_is_its_first_sentence():
    schema = {
        "properties": {
            "a": field(LONG),
            "b": {"type": "array", "items": field(LONG)},
            "c": {"additionalProperties": field(LONG, properties={"d": field("One.")})},
            "e": field("One."),
            "f": {"type": "array", "items": field("One.")},
        }
    }
    found = shorten_repeated(schema)["properties"]
    assert found["a"]["description"] == LONG
    assert found["b"] == {"type": "array", "items": field(FIRST)}
    assert found["c"]["additionalProperties"] == field(FIRST, properties={"d": field("One.")})
    assert found["e"] == field("One.")
    assert "description" not in found["f"]["items"], "kubectl explain shows that of the field"
    assert schema["properties"]["b"]["items"]["description"] == LONG, "the reference is made from the same schema"
