"""The blocks of docs/adapters.md, which users paste below a function of another project."""

import re

from tests.paths import ROOT

_PAGE = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
ADAPTERS = {
    section.partition("\n")[0]: re.findall(r"```python\n(.*?)```", section, re.S)
    for section in _PAGE.split("\n## ")[1:]
}
"""By heading."""
