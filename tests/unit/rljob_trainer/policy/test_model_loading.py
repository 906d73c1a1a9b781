"""What a rank reports when its model cannot be loaded. The loader of transformers is replaced: its import is slow."""

import sys
from types import SimpleNamespace

import pytest
import torch

from rljob_api.errors import TransientError, UserError
from rljob_trainer.policy.model_loading import load_network


class SafetensorError(Exception):
    """As the one of safetensors, which is a bare Exception."""


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (
            SafetensorError("incomplete metadata, file not fully covered"),
            UserError,
            "SafetensorError: incomplete metadata",
        ),
        (OSError("Error no file named model.safetensors found in /m"), UserError, "Error no file named"),
        (KeyError("qwen9"), UserError, "KeyError: 'qwen9'"),
        (OSError("We couldn't connect to 'https://huggingface.co'"), TransientError, "We couldn't connect"),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "CUDA out of memory"),
    ],
)
def test_model_that_cannot_be_loaded_is_reported_in_one_line(raised, expected, message, monkeypatch):
    def from_pretrained(*args, **options):
        raise raised

    loader = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=loader))
    with pytest.raises(expected) as caught:
        load_network("/m", dtype=torch.float32, attention="sdpa", options={})
    assert message in str(caught.value)
    assert str(caught.value).startswith("spec.model.source: ") is (expected is UserError)
