"""What is read of a checkpoint that others may have written."""

import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save

from rljob_trainer.policy.checkpoint_storage import METADATA, build_reader
from rljob_trainer.run_folder.file_facts import DamagedCheckpointError


class Program:
    def __init__(self, function, *arguments):
        self._call = (function, arguments)

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize("function", [os.mkdir, eval])
def test_index_of_a_checkpoint_runs_no_code(tmp_path, function):
    made = tmp_path / "made"
    argument = str(made) if function is os.mkdir else f"__import__('os').mkdir({str(made)!r})"
    (tmp_path / METADATA).write_bytes(pickle.dumps(Program(function, argument)))
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata has \w+\.\w+, which no checkpoint has"):
        build_reader(tmp_path).read_metadata()
    assert not made.exists()


def test_index_is_read_as_torch_has_written_it(tmp_path):
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    state = {"model": model.state_dict(), "num_updates": 3, "generator.0": torch.get_rng_state(), "list": [1, "a"]}
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    index = build_reader(tmp_path).read_metadata()
    assert index.state_dict_metadata.keys() == {"model.weight", "model.bias", "num_updates", "generator.0", "list"}
    assert index.state_dict_metadata["model.weight"].properties.dtype == torch.bfloat16


def test_index_is_read_as_the_python_of_the_images_has_written_it(tmp_path, monkeypatch):
    """Debian 12's Python pickles a member of an enumeration as a call of getattr."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    save({"weight": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    assert b"getattr" in (tmp_path / METADATA).read_bytes()
    found = build_reader(tmp_path).read_metadata().state_dict_metadata["weight"]
    assert found.properties.memory_format == torch.contiguous_format


@pytest.mark.parametrize(("kind", "name"), [(_MEM_FORMAT_ENCODING, "__init__"), (StorageMeta, "__reduce__")])
def test_index_takes_nothing_but_members(tmp_path, kind, name):
    (tmp_path / METADATA).write_bytes(pickle.dumps(Program(getattr, kind, name)))
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata takes __\w+__ of <"):
        build_reader(tmp_path).read_metadata()
