"""What a rank reports when its model cannot be loaded. What uses transformers is replaced: its import is slow."""

from types import SimpleNamespace

import pytest
import torch

from rljob_api.errors import TransientError, UserError
from rljob_trainer.policy import model_loading
from rljob_trainer.policy.model_loading import open_network
from rljob_trainer.policy.sharded_weights import OtherTensors, UnreadableError

NETWORK = SimpleNamespace(config=SimpleNamespace(), get_output_embeddings=lambda: None, modules=lambda: [])


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
    def fail(*args, **options):
        raise raised

    def open_model():
        return open_network("/m", dtype=torch.float32, attention="sdpa", options={})

    monkeypatch.setattr(model_loading, "_open_skeleton", fail)
    with pytest.raises(expected) as opening:
        open_model()
    monkeypatch.setattr(
        model_loading,
        "_open_skeleton",
        lambda *args, **options: SimpleNamespace(network=NETWORK, fill=fail, other_tensors=OtherTensors()),
    )
    with pytest.raises(expected) as filling:
        open_model().fill(torch.device("cpu"))
    for caught in (opening, filling):
        assert message in str(caught.value)
        assert str(caught.value).startswith("spec.model.source: ") is (expected is UserError)


def test_a_model_that_has_no_slices_is_loaded_whole(monkeypatch, caplog):
    def refuse(*args, **options):
        raise UnreadableError("it has no safetensors files")

    monkeypatch.setattr(model_loading, "_open_skeleton", refuse)
    monkeypatch.setattr(model_loading, "_load_whole", lambda *args, **options: NETWORK)
    opened = open_network("/m", dtype=torch.float32, attention="sdpa", options={})
    opened.fill(torch.device("cpu"))
    assert opened.network is NETWORK
    assert "/m: every rank loads the whole model into host memory, because it has no safetensors files" in caplog.text
