"""The table of the chart's values."""

import re

import yaml

from dev import values_table
from dev.folders import replace
from tests.paths import CHART

VALUES = """
# A section.
image:
  # -- Where it is,
  # and more.
  repository: a/b
  tag: ""
# -- All of it | together.
resources:
  limits: {cpu: 1}
ports: [1, 2]
# -- A parent.
parent:
  # -- A child.
  one: null
  # Not a meaning.
  two: true
"""


def test_meanings_are_the_comments_above_and_defaults_are_json():
    assert values_table.render(VALUES).splitlines()[2:] == [
        '| `image.repository` | `"a/b"` | Where it is, and more. |',
        '| `image.tag` | `""` |  |',
        '| `resources` | `{"limits": {"cpu": 1}}` | All of it \\| together. |',
        "| `ports` | `[1, 2]` |  |",
        "| `parent` |  | A parent. |",
        "| `parent.one` | `null` | A child. |",
        "| `parent.two` | `true` |  |",
    ]


def test_readme_of_the_chart_has_every_value():
    readme, text = (CHART / "README.md").read_text(), (CHART / "values.yaml").read_text()
    assert replace(readme, "values", values_table.render(text)) == readme, "run `make generate`"
    rows = set(re.findall(r"^\| `([\w.]+)` \| ", readme, re.M))
    assert all(name in {row.partition(".")[0] for row in rows} for name in yaml.safe_load(text))
