"""Where things are: the root of the repository, and the data of the tests."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
EXAMPLES = ROOT / "examples"
CRDS = ROOT / "crds"
CHART = ROOT / "charts" / "rljob"
