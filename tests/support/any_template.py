"""Templates that are YAML: valid ones, valid ones with one place changed, and any other mapping."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

from hypothesis import strategies as st

from tests.support.pod_templates import ACCEPTED, REFUSED

_REPLACEMENTS: list[Any] = [
    *(
        0,
        1,
        -1,
        2**31,
        65536,
        1.5,
        True,
        "",
        "a",
        "A",
        "a b",
        "a=b",
        "a/b",
        "a/b/c",
        "-a",
        "a_b",
        "a.b",
        "Always",
        "None",
    ),
    *("1", "1.5", "500m", "1Gi", "1e3", "-1", "x" * 64, "NoSchedule", "Exists", "In", "http", "é", [], {}, ["a"], [1]),
    *({"a": "b"}, {"name": "a"}, [{"name": "a"}], [{}], {"cpu": "1"}, {"a/b": 2}, None),
]
_KNOWN = [
    spec["trainer"]["template"]
    for spec in (*ACCEPTED, *(case[0] for case in REFUSED))
    if "template" in spec.get("trainer", {})
]
_NAMES = [
    *("metadata", "labels", "annotations", "name", "spec", "containers", "initContainers", "volumes", "env", "image"),
    *("resources", "limits", "cpu", "nodeSelector", "tolerations", "affinity", "securityContext", "restartPolicy"),
    *("serviceAccountName", "hostNetwork", "ports", "containerPort", "volumeMounts", "mountPath", "value", "key"),
]
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT
    | st.sampled_from(
        ["1", "1.5", "500m", "1Gi", "9" * 40, "-1", "1e400", "a/b", "Always", "\U0001f600", "x" * 300_000]
    )
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES) | _TEXT, inner, max_size=4),
    max_leaves=12,
)
DEEP: Any = "a"
for _ in range(60):
    DEEP = {"spec": DEEP}


@st.composite
def templates(draw: st.DrawFn) -> dict[str, Any]:
    """A known template with some of its values replaced, or any mapping."""
    if draw(st.booleans()):
        return draw(
            st.dictionaries(st.sampled_from(["metadata", "spec"]) | st.sampled_from(_NAMES), _VALUES, max_size=3)
        )
    template, source = copy.deepcopy(draw(st.sampled_from(_KNOWN))), random.Random(draw(st.integers()))
    for _ in range(draw(st.integers(0, 2))):
        with contextlib.suppress(IndexError):  # nothing is left to be changed
            template = mutate(template, source)
    return template


def mutate(template: Any, source: random.Random) -> Any:
    """Return the template with one place below metadata or spec changed."""
    places = [place for place in _places(template, ()) if "labels" not in place]
    *outer, last = source.choice(places)
    copied = _copy(template)
    holder = copied
    for part in outer:
        holder = holder[part]
    if isinstance(last, str) and source.random() < 0.15:
        holder[source.choice([f"{last}x", "name", "image", "value"])] = holder.pop(last)
    else:
        holder[last] = _copy(source.choice(_REPLACEMENTS))
    return copied


def _places(value: Any, location: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = [(*location, part) for part, _ in entries]
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    deeper = [place for part, below in entries for place in _places(below, (*location, part))]
    return [place for place in inner if len(place) > 1] + deeper


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value
