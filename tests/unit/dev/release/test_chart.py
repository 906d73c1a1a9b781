"""What the packaged chart says beyond the repository's."""

import yaml

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
