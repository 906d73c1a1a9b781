"""What is read of a checkpoint that others may have written."""

import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
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
