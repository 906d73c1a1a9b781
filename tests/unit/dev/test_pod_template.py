"""The part of Kubernetes' schema that checks of Pod templates read."""

import pytest

from dev.pod_template import select

_OPTIONAL_TEXT = {"type": ["string", "null"]}
_DEFINITIONS = {
    "Pod": {
        "description": "A Pod.",
        "properties": {
            "description": {"$ref": "#/$defs/Text"},
            "name": {"type": "string"},
            "ports": {"items": {"$ref": "#/$defs/Port"}, "type": ["array", "null"]},
        },
        "required": ["name"],
        "type": ["object", "null"],
        "additionalProperties": False,
    },
    "Text": _OPTIONAL_TEXT | {"x-kubernetes-list-type": "atomic", "description": "A text."},
    "Port": {"oneOf": [_OPTIONAL_TEXT, {"type": ["integer", "null"]}]},
    "Node": {"type": ["object", "null"]},
}


def test_only_what_is_referred_to_is_kept_and_without_what_holds_for_all():
    assert select(_DEFINITIONS, "Pod") == {
        "Pod": {
            "properties": {
                "description": {"$ref": "#/$defs/Text"},
                "name": {"type": "string"},
                "ports": {"items": {"$ref": "#/$defs/Port"}, "type": "array"},
            },
            "required": ["name"],
            "type": "object",
        },
        "Text": {"type": "string"},
        "Port": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    }


def test_schema_in_which_an_optional_field_must_not_be_null_is_refused():
    with pytest.raises(AssertionError, match="only a required field must not be null"):
        select({"Pod": {"type": "object"}}, "Pod")
