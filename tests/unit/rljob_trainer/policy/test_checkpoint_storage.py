"""What is read of a checkpoint that others may have written."""

import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save

from rljob_trainer.policy.checkpoint_storage import METADATA, build_reader, restore
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weight", "weight is a tensor, and the checkpoint has another kind of value"),
        ("num_updates", "no checkpoint has"),
    ],
)
def test_value_of_a_checkpoint_runs_no_code(tmp_path, name, message):
    made = tmp_path / "made"
    evil = {"weight": torch.ones(2), "num_updates": 3} | {name: Program(os.mkdir, str(made))}
    save(evil, storage_writer=FileSystemWriter(tmp_path / "saved"), no_dist=True)
    with pytest.raises(DamagedCheckpointError, match=message):
        restore({"weight": torch.zeros(2), "num_updates": 0}, tmp_path / "saved")
    assert not made.exists()


def test_values_are_read_as_torch_has_written_them(tmp_path):
    state = {"weight": torch.ones(2), "group": {"lr": 0.1, "betas": (0.9, 0.99), "params": ["a"], "on": None}, "n": 3}
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    read = {"weight": torch.zeros(2), "group": {"lr": 0, "betas": (), "params": [""], "on": 1}, "n": 0}
    restore(read, tmp_path)
    assert read["weight"].tolist() == [1, 1]
    assert (read["group"], read["n"]) == (state["group"], 3)


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
