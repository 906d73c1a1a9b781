"""What the errors of an import say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_service.worker.load.entrypoints import BoundFunction
from rljob_service.worker.load.loading import load
from rljob_service.worker.settings import FunctionSettings
from tests.support.plugins import REFERENCES


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            "raise ImportError('libtorch_cpu.so: failed to map segment from shared object')",
            "more address space than function.maxMemory, 2Gi: raise it, for torch to 16Gi",
        ),
        ("from . import helper", "no known parent package; a file is a part of a package as far as"),
        (
            "import not_installed_anywhere",
            r"function.requirements or to rewards\[\].image, or its folder to PYTHONPATH in env$",
        ),
        (
            "open('table.json')",
            r"'table.json' \(its working folder is a scratch folder: name a file next to the source as",
        ),
        (
            "import sqlite3; sqlite3.connect('none/x.db')",
            r"unable to open database file \(its working folder is a scratch",
        ),
        (
            "import os; os.environ['OWN_KEY']",
            r"KeyError: 'OWN_KEY' \(it does not get the variables of your shell: set it in env",
        ),
        (
            "import socket; socket.create_connection(('127.0.0.1', 9))",
            r"refused \(nothing listens there; a service of this job",
        ),
        ("open('/no/table.json')", r"'/no/table.json' \(while the file was imported\)$"),
        ("raise OSError('Couldn\\'t reach the Hub')", r"the Hub \(while the file was imported\)$"),
        ("raise OSError(12, 'Cannot allocate')", "function.maxMemory is 2Gi of address space"),
    ],
)
def test_failed_import_names_its_remedy(statement: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        load(FunctionSettings(statement, "reward.py", None, "auto", {}, 2 << 30))


SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
def right(completions, answer, **kwargs): return [float(c == a) for c, a in zip(completions, answer)]
def short(completions, **kwargs): return [0.5 for c in completions]
def _hidden(completions): return [0.0]
def helper(x): return x
trainer = GRPOTrainer(model="m", reward_funcs=[right, short])
trainer.train()
"""


def load_source(source: str, **settings: Any) -> BoundFunction:
    return load(
        FunctionSettings(
            source,
            "r.py",
            signature="auto",
            kwargs={},
            max_memory_bytes=2 << 30,
            **{"entrypoint": None, "signatures": REFERENCES, **settings},
        )
    )


def test_training_script_is_recognised_before_it_runs() -> None:
    with pytest.raises(UserError) as caught:
        load_source(SCRIPT)
    assert str(caught.value) == (
        "r.py:8: the import would train, in the reward's server: move right, short, _hidden, helper, with the imports "
        "and constants that they use, to a file of their own"
    )


@pytest.mark.parametrize(
    "rest",
    [
        "if __name__ == '__main__':\n    GRPOTrainer(right).train()",
        "def main(): GRPOTrainer(right).train()",
        "class Model:\n    def train(self): pass\nModel().train()",
    ],
)
def test_source_that_does_not_train_at_its_import_is_loaded(rest: str) -> None:
    bound = load_source(f"def right(completions, **kwargs): return [1.0]\n{rest}", entrypoint="right")
    assert bound.entrypoint == "right"


def test_several_functions_of_a_file_are_summed() -> None:
    functions = SCRIPT.partition("trainer =")[0].replace("from trl import GRPOConfig, GRPOTrainer", "")
    bound = load_source(functions, entrypoint="right, short")
    assert bound.sample is not None
    sample = {"prompt": "", "completion": "4", "ground_truth": "4", "answer_column": "answer"}
    [outcome] = bound.sample.read(bound.sample.call([sample]), [sample])
    assert (outcome.score, outcome.components) == (1.5, {"right": 1.0, "short": 0.5})
    with pytest.raises(UserError, match=r"the entry point rihgt was not found .* did you mean right\?"):
        load_source(functions, entrypoint="rihgt, short")
    with pytest.raises(
        UserError, match=r"set function.entrypoint, or for their sum function.entrypoints: \[right, short\]$"
    ):
        load_source(functions)


@pytest.mark.parametrize("has_init", [True, False])
def test_file_of_a_package_is_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_init: bool) -> None:
    """Repositories keep rewards in packages. Without __init__.py, its own folder is one."""
    files = {
        "kit/rewards/math.py": f"from .texts import strip\n{'from ..shared import WORTH' if has_init else 'WORTH = 2'}",
        "kit/rewards/texts.py": "strip = str.strip",
        "kit/shared.py": "WORTH = 2",
        **(dict.fromkeys(("kit/__init__.py", "kit/rewards/__init__.py"), "") if has_init else {}),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own = "\ndef compute_score(solution_str, ground_truth): return WORTH * (strip(solution_str) == ground_truth)\n"
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "kit/rewards/math.py"
    bound = load(FunctionSettings(path.read_text() + own, str(path), None, "auto", {}, 2 << 30, signatures=REFERENCES))
    assert bound.sample is not None
    sample = {"prompt": "", "completion": " 4 ", "ground_truth": "4"}
    assert bound.sample.read(bound.sample.call([sample]), [sample])[0].score == 2
    for name in [name for name in sys.modules if name.partition(".")[0] in ("kit", "rewards")]:
        del sys.modules[name]
