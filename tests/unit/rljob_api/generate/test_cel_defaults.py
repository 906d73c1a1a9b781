from typing import Any, ClassVar

import pytest

from rljob_api.generate.cel_defaults import fill_defaults
from rljob_api.manifest.base import Spec


class Item(Spec):
    name: str
    weight: float = 1.0


class Section(Spec):
    count: int = 3
    text: str = "it's"
    limit: int | None = None
    items: list[Item] = []


class Root(Spec):
    source: str
    section: Section = Section()
    other: Section | None = None
    is_on: bool = False
    free: dict[str, Any] = {}
    RULES: ClassVar = ()


@pytest.mark.parametrize(
    ("cel", "filled"),
    [
        ("self.source.startsWith('self.isOn')", "self.source.startsWith('self.isOn')"),
        ("self.isOn || self.section.count > 1", "self.?isOn.orValue(false) || self.?section.?count.orValue(3) > 1"),
        ("has(self.section.limit)", "self.?section.?limit.hasValue()"),
        ("has(self.isOn) && self.isOn", "has(self.isOn) && self.isOn"),
        ("!has(self.other) || self.other.count == 1", "!has(self.other) || self.other.?count.orValue(3) == 1"),
        (
            "self.section.items.all(i, i.weight > 0.0 && i.name != 'x')",
            "(self.?section.?items.hasValue() ? "
            "self.section.items.all(i, i.?weight.orValue(1.0) > 0.0 && i.name != 'x') : true)",
        ),
        ("self.section.items.size() == 0", "(self.?section.?items.hasValue() ? self.section.items.size() : 0) == 0"),
        (
            "self.isOn == oldSelf.isOn",
            "(has(self.isOn) ? self.isOn : false) == (has(oldSelf.isOn) ? oldSelf.isOn : false)",
        ),
        (
            "self.free == oldSelf.free",
            "(has(self.free) ? self.free : dyn({})) == (has(oldSelf.free) ? oldSelf.free : dyn({}))",
        ),
        ("self.source == oldSelf.source", "self.source == oldSelf.source"),
    ],
)
def test_absent_field_is_read_as_its_default(cel: str, filled: str) -> None:
    assert fill_defaults(cel, Root) == filled


def test_object_is_compared_field_by_field() -> None:
    filled = fill_defaults("self.section == oldSelf.section", Root)
    assert filled.count(" == ") == 5
    assert "(self.?section.?limit.hasValue()) == " not in filled
    assert "self.?section.?limit.hasValue() == oldSelf.?section.?limit.hasValue()" in filled
