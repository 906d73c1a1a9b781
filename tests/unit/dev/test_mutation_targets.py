"""The targets of `make mutation` are modules and tests that exist."""

import pytest
import yaml

from tests.paths import ROOT

TARGETS = yaml.safe_load((ROOT / "dev/mutation/targets.yaml").read_text())


@pytest.mark.parametrize("name", TARGETS)
def test_target_names_a_module_and_its_tests(name):
    target = TARGETS[name]
    assert (ROOT / target["file"]).is_file()
    assert target["file"].endswith(target["module"].replace(".", "/") + ".py")
    assert all((ROOT / path).exists() for path in target["tests"])
