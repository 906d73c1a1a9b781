"""What the packaged chart says beyond the repository's."""

import json

import pytest
import yaml

from dev.release.__main__ import _parse
from dev.release.chart import describe
from tests.paths import CHART


def test_chart_names_its_commit_and_stays_the_same_otherwise():
    text = (CHART / "Chart.yaml").read_text()
    before, after = yaml.safe_load(text), yaml.safe_load(describe("Chart.yaml", text, "1a2b3c", None))
    assert after["annotations"].pop("org.opencontainers.image.revision") == "1a2b3c"
    assert after == before


def test_all_images_are_those_of_the_registry():
    values = yaml.safe_load(describe("values.yaml", (CHART / "values.yaml").read_text(), "1a2b", "example.com:5000/x"))
    defaults = values["defaults"]
    named = [values["image"]["repository"], defaults["trainerImage"], defaults["rewardImage"]]
    named += defaults["pythonImages"].values()
    assert [name.partition("/rljob/")[0] for name in named] == ["example.com:5000/x"] * 4
    text = describe("Chart.yaml", (CHART / "Chart.yaml").read_text(), "1a2b", "example.com:5000/x")
    assert yaml.safe_load(yaml.safe_load(text)["annotations"]["artifacthub.io/images"])[0]["image"].startswith(
        "example.com:5000/x/rljob/operator:"
    )
    assert describe("README.md", text, "1a2b", "example.com:5000/x") == text, "a second time changes nothing"


@pytest.mark.parametrize(
    ("architectures", "only"), [("amd64", "amd64"), ("arm64", "arm64"), ("amd64,arm64", ""), ("", "")]
)
def test_operator_and_jobs_select_the_only_architecture_of_the_images(architectures, only):
    selector = {"kubernetes.io/os": "linux"} | ({"kubernetes.io/arch": only} if only else {})
    values = yaml.safe_load(describe("values.yaml", (CHART / "values.yaml").read_text(), "1a2b", None, architectures))
    assert (values["nodeSelector"], values["defaults"]["nodeSelector"]) == (selector, selector)
    readme = describe("README.md", (CHART / "README.md").read_text(), "1a2b", None, architectures)
    assert readme.count(f"`{json.dumps(selector)}`") == 2


def test_images_have_the_architecture_of_the_machine_that_builds_them():
    assert _parse([]).architectures in ("amd64", "arm64")
