"""What a rehearsal does before it starts anything."""

import importlib.util
import sys

import pytest

from rljob_api.manifest.job_sections import Model
from rljob_trainer.rehearsal.main import leave_out_torch


@pytest.mark.parametrize("trusts_code", [False, True])
def test_torch_is_left_out_unless_the_model_brings_code(monkeypatch, trusts_code):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "")
    leave_out_torch(Model(source="/m", trust_remote_code=trusts_code))
    assert (importlib.util.find_spec("torch") is not None) == trusts_code
    monkeypatch.delitem(sys.modules, "torch", raising=False)
